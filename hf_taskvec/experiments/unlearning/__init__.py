"""The unlearning experiment: its config, its inputs, and the summary that ends a run."""
