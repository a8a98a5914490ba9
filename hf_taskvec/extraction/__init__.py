"""From models to task vectors: full fine-tunes, LoRA adapters, and whatever else holds a vector."""
