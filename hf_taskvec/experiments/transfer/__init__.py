"""A book that nothing was fine-tuned on, reached by the task vectors of others: Theorem 3 on language models.

- `transfer_config`, `transfer_inputs`: settings and inputs of `recipes/transfer.py`.
- `new_book`: correlations of the new book with the others, the λ that follow, and the models that are compared.
- `transfer_results`: what is reported.
"""
