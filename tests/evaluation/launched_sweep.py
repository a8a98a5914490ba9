"""A small sweep for `accelerate launch`: launched_sweep.py OUTPUT BATCH_SIZE [sampled] [rows].

Trains nothing and reads nothing: the same weights in every process, from a seed.
"""

import sys

import torch
from evaluation.tiny import HeadEdit, RowHeadEdit, make_books, make_tokenizer, tiny_llama

from hf_taskvec.evaluation import protocols, sweep


def main(output: str, batch_size: int, sampled: bool, rows: bool) -> None:
    model = tiny_llama()
    delta = 0.3 * torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    decoding = protocols.Decoding(temperature=0.7, top_p=0.9) if sampled else protocols.Decoding()
    protocol = protocols.get(prompt_length=14, answer_length=8, samples=10, decoding=decoding)
    edit = (RowHeadEdit if rows else HeadEdit)(model, delta)
    sweep(
        model,
        edit,
        (0, -0.5, -1),
        make_books(),
        protocol,
        tokenizer=make_tokenizer(),
        output=output,
        batch_size=batch_size,
        resamples=200,
        permutations=200,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "sampled" in sys.argv[3:], "rows" in sys.argv[3:])
