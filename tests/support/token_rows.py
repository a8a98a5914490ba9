"""Rows and passages of tokens, and models edited by hand."""

import copy

import torch

from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.evaluation.texts.passages import Passage


def rows(seed: int, count: int = 7, most: int = 12) -> list[list[int]]:
    """Random rows of different lengths, for the tiny models' vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, most, (count,), generator=generator).tolist()
    return [torch.randint(3, 20, (length,), generator=generator).tolist() for length in lengths]


def edited(base: torch.nn.Module, *changes: tuple[float, torch.nn.Module]) -> torch.nn.Module:
    """base + Σ weight (other − base), by hand."""
    model = copy.deepcopy(base)
    with torch.no_grad():
        others = [(weight, dict(other.named_parameters())) for weight, other in changes]
        for name, parameter in model.named_parameters():
            start = parameter.clone()
            for weight, other in others:
                parameter += weight * (other[name] - start)
    return model


def token_passages(seed: int, count: int = 5, most: int = 12) -> tuple[TokenizedPassage, ...]:
    """Random passages of different lengths, for the tiny models' vocabulary; the texts tell the tokens."""
    found = []
    for number, (prompt, answer) in enumerate(zip(rows(seed, count, most), rows(seed + 100, count, most), strict=True)):
        texts = (" ".join(map(str, ids)) for ids in (prompt, answer))
        passage = Passage(f"book/seen/{number}", "book", "seen", next(texts), " ", next(texts))
        found.append(TokenizedPassage(passage, tuple(prompt), tuple(answer), len(answer)))
    return tuple(found)
