"""The unlearning experiment: what `recipes/unlearn.py` and `recipes/baselines.py` call, step by step.

- `unlearn_config`: every setting.
- `unlearn_inputs`: books, base model and tokenizer, checked before any long work.
- `memory_check`: whether all trainings and the sweep fit into memory.
- `book_similarity`: how alike the books are, and which λ theory recommends.
- `scale_refinement`: the sweep, with more λ where the book is just forgotten.
- `summary_text`: the table and the sentences that end a run.
- `baselines_config`, `compared_methods`: other unlearning methods beside task vectors, and the table of them all.
"""
