"""Rows of tokens, and models edited by hand."""

import copy

import torch


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
