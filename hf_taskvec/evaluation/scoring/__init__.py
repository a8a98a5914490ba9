"""Step 3, first half: metrics of single passages, statistics over them, and the choice of λ."""
