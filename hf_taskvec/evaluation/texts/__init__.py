"""Step 1: books, and the passages of them that a model is asked for."""
