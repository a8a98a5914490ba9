"""What a task vector is: stored tensors, changes made of them, the sum that evaluates them, and `TaskVector`."""
