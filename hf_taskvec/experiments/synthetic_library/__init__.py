"""The embedded default: a small library of made-up books, and a tiny Phi to read them. Nothing is downloaded."""
