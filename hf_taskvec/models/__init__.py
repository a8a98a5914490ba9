"""What a model is: its parameter names and layout, checkpoints, live models, and the files that belong to it."""
