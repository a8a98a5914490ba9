"""From task vectors to models: checkpoints, live models and PEFT adapters."""
