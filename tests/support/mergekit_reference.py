"""Runs in the Python of an environment that has mergekit: its merging methods on tensors from a file.

    python mergekit_reference.py inputs.safetensors jobs.json outputs.safetensors

It is given the tensors in fp64, so that what it gives is what the method means, and not mergekit's roundings. Inputs
are `base`, `tuned0`, `tuned1`, ...; a job names a method, its parameters, and how many of them it merges. For methods
that draw random masks, the masks are given as `<job>.mask0`, ...: they are handed to mergekit where it calls
`torch.bernoulli`.
"""

import json
import sys
from pathlib import Path

import torch
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import TensorGroup
from safetensors.torch import load_file, save_file

inputs, jobs, outputs = sys.argv[1:]
tensors = {name: each.double() if each.is_floating_point() else each for name, each in load_file(inputs).items()}
tuned = [tensors[f"tuned{number}"] for number in range(sum(name.startswith("tuned") for name in tensors))]
results = {}
for job, wanted in json.loads(Path(jobs).read_text()).items():
    masks = [tensors[name].float() for name in sorted(tensors) if name.startswith(f"{job}.mask")]
    taken = tuned[: wanted["models"]]
    models, base = ([tensors["base"], *taken], 0) if wanted["method"] != "linear" else (taken, None)
    given = {name: value for name, value in wanted["parameters"].items() if value is not None}
    group = TensorGroup.from_tensors(models, base_index=base)
    bernoulli, torch.bernoulli = torch.bernoulli, lambda _, masks=masks: masks.pop(0)
    try:
        results[job] = registry.get(wanted["method"])([group], parameters=given)[0]
    finally:
        torch.bernoulli = bernoulli
    assert not masks, "mergekit drew fewer masks than it was given"
save_file(results, outputs)
