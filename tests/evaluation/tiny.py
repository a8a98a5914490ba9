"""A made-up story, a small tokenizer and tiny models: enough for every test that needs no real text."""

from typing import Any

STORY = " ".join(
    f"Sentence number {i} tells of the {i * 7919 % 1009} lamps in room {i % 17}." for i in range(900)
)


def make_tokenizer() -> Any:
    """A byte-level tokenizer of our own, without a pad token (as Llama's and GPT-2's)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet)
    raw.train_from_iterator([STORY], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


def tiny_llama(context: int = 256, seed: int = 0):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        eos_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tiny_gpt2(context: int = 256, seed: int = 0):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=context, eos_token_id=0, bos_token_id=0
    )
    return GPT2LMHeadModel(config).eval()
