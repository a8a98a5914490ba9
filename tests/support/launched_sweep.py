"""A small sweep for `accelerate launch`: launched_sweep.py OUTPUT BATCH_SIZE [options].

`sampled` decodes by sampling, `rows` sets one λ for each row, `reference` compares with a model,
`memory=N` lets memory run out in the last process
for every batch of more than N rows, `late=N` the same but not in the first batch. Trains nothing and reads
nothing: the same weights in every process, from a seed.
"""

import os
import sys

import torch
from support.tiny_books import HeadEdit, RowHeadEdit, make_books, make_tokenizer, tiny_llama
from transformers import LlamaForCausalLM

from hf_taskvec.evaluation import protocols, sweep


class LittleMemory(LlamaForCausalLM):
    """A model that runs out of memory with more than so many rows, after so many batches."""

    most_rows, batches_before = 0, 0

    def generate(self, input_ids, **kwargs):
        self.batches_before -= 1
        if self.batches_before < 0 and len(input_ids) > self.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return super().generate(input_ids=input_ids, **kwargs)


def main(output: str, batch_size: int, options: list[str]) -> None:
    model = tiny_llama()
    numbers = dict(option.split("=") for option in options if "=" in option)
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    if numbers and last:
        model.__class__ = LittleMemory
        model.batches_before = 1 if "late" in numbers else 0
        model.most_rows = int(next(iter(numbers.values())))
    delta = 0.3 * torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    decoding = protocols.Decoding(temperature=0.7, top_p=0.9) if "sampled" in options else protocols.Decoding()
    protocol = protocols.get(prompt_length=14, answer_length=8, samples=6, decoding=decoding)
    edit = (RowHeadEdit if "rows" in options else HeadEdit)(model, delta)
    sweep(
        model,
        edit,
        (0, -0.5, -1),
        make_books(),
        protocol,
        tokenizer=make_tokenizer(),
        output=output,
        batch_size=batch_size,
        reference={"another seed": tiny_llama(seed=1)} if "reference" in options else None,
        resamples=200,
        permutations=200,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
