"""Step 2: asking the model. Batches, generation, and the store of finished passages."""
