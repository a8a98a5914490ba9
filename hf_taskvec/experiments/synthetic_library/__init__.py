"""The embedded default: a small library of made-up books, and a tiny Phi to read them. Nothing is downloaded.

- `book_writer`: `write_library`, the books of a seed.
- `themes`: the words and sentence patterns that they are made of.
- `tiny_phi`: the model, and a tokenizer trained on the spot.
"""
