"""From models to task vectors: full fine-tunes, LoRA adapters, and whatever else holds a vector.

- `from_finetuned`: a full fine-tune and its base -> task vector
- `token_differences`: the same of a vocabulary, token by token
- `from_adapter`: a LoRA adapter -> task vector, for each variant of LoRA
- `adapter_files`: what an adapter's folder or a live PeftModel holds, and the base that it belongs to
- `from_deepspeed`: a checkpoint of DeepSpeed ZeRO -> a model's folder, if its pickles are trusted
- `from_any`: `open_vector`, for a folder or Hub id of which one need not know what it holds
"""
