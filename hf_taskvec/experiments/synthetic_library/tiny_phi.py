"""The embedded default's model: a real, if tiny, Phi, and a tokenizer trained on the spot."""

from typing import TYPE_CHECKING

from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from transformers import PhiForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
HEADS = 4


def train_tokenizer(text: str, vocabulary: int = 1024) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer, as Phi's: any text can be encoded, and nothing is lost. It has no unknown token.

    Training is deterministic: the same text gives the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary <= len(alphabet):
        raise BadValueError(f"vocabulary={vocabulary}: a byte-level tokenizer needs more than {len(alphabet)} entries.")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    raw.train_from_iterator(text.split("\n\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=END, eos_token=END, pad_token=END)


def make_phi(
    vocabulary: int, *, hidden: int = 128, layers: int = 4, heads: int = HEADS, context: int = 192, seed: int = 0
) -> "PhiForCausalLM":
    """A `PhiForCausalLM` of random weights, about a million of them by default."""
    import torch
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PhiForCausalLM(config).eval()
