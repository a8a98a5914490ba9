"""Step 2: asking the model. Edits whose λ can be set, batches, generation, and the store of finished passages."""
