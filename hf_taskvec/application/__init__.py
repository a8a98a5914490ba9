"""From task vectors to models: checkpoints, live models and PEFT adapters.

- `to_checkpoint`: `apply`, which writes a whole model folder; `checkpoint_writing` computes and writes its tensors,
  `finished_files` knows what an interrupted run has finished
- `to_live_model`: `edit` and `applied_to`, which put a vector on a live model; `live_edit` is the handle that they
  give, in two kinds: `merged_edit` (into the weights) and `attached_edit` (beside them)
- `output_noise`: `OutputNoise`, noise on a live model's logits, to compare an edit with
- `to_adapter`: `to_adapter`, which writes a PEFT adapter
- `serving`: what vLLM takes of an adapter, and `max_lora_rank`, which it has to be started with
- `token_rows`: `add_tokens`, and where a model has the rows of tokens that a vector adds
- `compatibility`: does a vector fit a model? The checks that all of them make first
"""
