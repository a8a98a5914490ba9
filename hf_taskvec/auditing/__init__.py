"""Whether a book is really forgotten: a sceptic's attacks on an edited model, beside two other models.

Every attack is made on the edited model, on the untouched one and on a reference that never saw the book, with the
same seeds and the same budget. Without the attacked reference, relearning would only measure learning.

- `attacks/`: one module an attack. Each knows models and passages, and nothing of verdicts.
"""
