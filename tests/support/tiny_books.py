"""A made-up story, a small tokenizer and tiny models: enough for every test that needs no real text."""

from typing import Any

STORY = " ".join(f"Sentence number {i} tells of the {i * 7919 % 1009} lamps in room {i % 17}." for i in range(900))


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


def tiny_llama(context: int = 256, seed: int = 0, width: int = 32):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=width,
        intermediate_size=2 * width,
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


class InPlaceEdit:
    """θ + λ·τ written into the weights; τ is a tuned model minus this one."""

    def __init__(self, model, tuned, fingerprint="in-place"):
        import torch

        self.fingerprint, self.calls = fingerprint, []
        self._pairs = []
        other = dict(tuned.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self._pairs.append((parameter, parameter.clone(), other[name] - parameter))

    def set_scale(self, scale):
        import torch

        self.calls.append(scale)
        with torch.no_grad():
            for parameter, base, delta in self._pairs:
                parameter.copy_(base + scale * delta)


class HeadEdit:
    """A change of the output layer alone, λ for the whole batch (in the weights)."""

    fingerprint = "head"

    def __init__(self, model, delta):
        self.layer, self.delta, self.base = model.lm_head, delta, model.lm_head.weight.detach().clone()

    def set_scale(self, scale):
        import torch

        with torch.no_grad():
            self.layer.weight.copy_(self.base + scale * self.delta)


class RowHeadEdit:
    """The same change, by a hook, with one λ for each row."""

    fingerprint = "head"

    def __init__(self, model, delta):
        self.scales, self.delta, self.calls = [0.0], delta, []
        model.lm_head.register_forward_hook(self._add)

    def set_scale(self, scale):
        self.scales = [scale]

    def set_row_scales(self, scales):
        self.calls.append(list(scales))
        self.scales = scales

    def _add(self, layer, args, output):
        import torch

        factor = torch.tensor(self.scales)[:, None, None]
        return output + factor * (args[0] @ self.delta.T)


def make_books():
    """A book to forget and one to keep, made up."""
    import datasets

    from hf_taskvec.evaluation import load_book

    other = STORY.replace("lamps", "boats").replace("tells of", "counts all").replace("room", "harbour")
    return [
        load_book(datasets.Dataset.from_dict({"text": [text]}), name, role=role, block_words=300)
        for text, name, role in ((STORY, "lamps", "forget"), (other, "boats", "retain"))
    ]


def train(model, tokenizer, books, steps=60, length=64, lr=3e-3, batch=8):
    """A few steps of fine-tuning on the seen text of the books; returns the model."""
    import datasets
    import torch

    blocks = datasets.concatenate_datasets([book.training_blocks(tokenizer, length) for book in books])
    ids = torch.tensor(blocks["input_ids"])
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for _ in range(steps):
        rows = ids[torch.randint(len(ids), (batch,), generator=draw)]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
