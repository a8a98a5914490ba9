"""Weights that are stored in fewer bits: a source for each, and the way back to the same format."""
