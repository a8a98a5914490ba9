"""Step 3: scores of what the model wrote, with intervals and tests, and the choice of λ."""
