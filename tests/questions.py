"""Twenty questions of newcomers, written down before the pages were arranged, and the clicks that answer each.

Where they come from: the library's own list of how-tos, and what users of PEFT, mergekit and open-unlearning asked in
their issues. A click is the text of a link (of the page's body, or of the tabs above it); the answer is what must be on
the page where the last one leads. `test_site.py` goes there in a browser.
"""

from typing import NamedTuple


class Question(NamedTuple):
    """What somebody wants to know, how to get there from the first page, and what stands there."""

    question: str
    clicks: tuple[str, ...]
    answer: str
    asked: str = "our list"


QUESTIONS = (
    Question("How do I make a model forget one book, and prove it?", ("Forget a book",), "done.outcome"),
    Question("Merge three adapters into one of rank 16, and serve it", ("Merge adapters",), "compress(rank=16)"),
    Question("Can each layer have a λ of its own?", ("How to", "λ by layer"), 'by="layer"'),
    Question("My base is loaded in four bits.", ("Quantised bases",), "load_in_4bit"),
    Question("How do I add a metric of my own?", ("How to", "Your own parts"), "own_metrics=[metric]"),
    Question("How do I use all my GPUs?", ("How to", "Many processes"), "accelerate launch"),
    Question("The run was killed. Is all lost?", ("How to", "Resume"), "goes on at the next batch"),
    Question("How do I put the result on the Hub?", ("How to", "Push to the Hub"), "push_to_hub"),
    Question("How does CI notice that a model knows a book again?", ("How to", "Check in CI"), "exit code"),
    Question("Which λ?", ("Choose λ",), "recommend_scales"),
    Question(
        "LoRA_1 − LoRA_2 raises a math domain error", ("footguns",), "cross terms", "peft issues 1907, 2796, 3004"
    ),
    Question(
        "I trained embeddings with the adapter: is it right?", ("Tied embeddings",), "ensure_weight_tying", "peft"
    ),
    Question(
        "How do I extract a LoRA from a full fine-tune?", ("Export an adapter",), "compress(rank=", "mergekit, peft"
    ),
    Question("The size of tensor a must match: vocab_size", ("Vocabularies that differ",), "union", "mergekit 47, 342"),
    Question("I have a YAML of dare_ties", ("mergekit's YAML",), "taskvec merge", "mergekit"),
    Question("It needs more RAM than I have", ("Benchmarks",), "MB", "mergekit 71"),
    Question("Is my architecture supported?", ("Coverage",), "model types", "mergekit"),
    Question(
        "Which model do I compare with; must I retrain?", ("Which λ, and why",), "reference=base", "open-unlearning 84"
    ),
    Question(
        "Forget quality and truth ratio on TOFU", ("Named benchmarks",), "load_benchmark", "open-unlearning 43, 111"
    ),
    Question(
        "How do I run GA, GradDiff or NPO as baselines?", ("What others would do",), "grad_diff", "open-unlearning 71"
    ),
)
