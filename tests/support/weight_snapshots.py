"""The weights of a live model at a moment, to compare them with later."""

import torch


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(model, expected):
    return all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
