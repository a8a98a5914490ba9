"""Merging rules against mergekit 0.1.5's own code, on the same fp32 tensors: it computes in fp64, we round once.

mergekit needs other versions than this project, so it runs in an environment of its own: `.venv-mergekit`, which
`make test-mergekit` makes, or that of the Python which the variable `MERGEKIT_PYTHON` names. Without one these tests
are skipped. What is different on purpose:

- mergekit divides TIES by the sum of the weights that agree, signs and all, so that a vector of weight −1 is *added*.
  Ours divides by magnitudes (`normalize="weight"`), which is the same for positive weights.
- mergekit scales DARE's vectors up to the l1 norm that they had. Ours divides by the density, as the paper does, which
  keeps the expected value.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_taskvec import TaskVector, combine

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("MERGEKIT_PYTHON") or str(ROOT / ".venv-mergekit" / "bin" / "python")
pytestmark = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="there is no mergekit: run `make test-mergekit`")

SHAPE = (1100, 512)  # more than one tile
WEIGHTS = [0.75, 0.5, 1.75]  # exact in fp32, to which mergekit rounds them for `linear`
MIXED = [0.75, -0.5, 1.75]

# Our rule, our options, and mergekit's method and parameters that must give the same.
JOBS: dict[str, tuple[str, list[float], dict[str, Any], str, dict[str, Any]]] = {
    "linear": ("weighted", WEIGHTS, {}, "linear", {"normalize": True}),
    "linear_sum": ("sum", [0.25, 0.25, 0.5], {}, "linear", {"normalize": False}),
    "task_arithmetic": ("sum", MIXED, {}, "task_arithmetic", {}),
    "ties": ("ties", WEIGHTS, {"density": 0.3, "normalize": "weight"}, "ties", {"density": 0.3}),
    "ties_ones": ("ties", [1.0] * 3, {"density": 0.3}, "ties", {"density": 0.3}),
    "ties_sum": ("ties", MIXED, {"density": 0.3, "normalize": "none"}, "ties", {"density": 0.3, "normalize": False}),
    "breadcrumbs": (
        "breadcrumbs",
        MIXED,
        {"density": 0.7, "gamma": 0.02},
        "breadcrumbs",
        {"density": 0.7, "gamma": 0.02},
    ),
    "breadcrumbs_ties": (
        "breadcrumbs_ties",
        WEIGHTS,
        {"density": 0.7, "gamma": 0.02, "normalize": "none"},
        "breadcrumbs_ties",
        {"density": 0.7, "gamma": 0.02, "normalize": False},
    ),
    "model_stock": ("model_stock", [1.0] * 3, {}, "model_stock", {"weight": None}),  # it has no weights
    "slerp": ("slerp", [1.0] * 2, {"t": 0.4}, "nuslerp", {"weight": [0.6, 0.4]}),  # of two vectors
    "sce": ("sce", [1.0] * 3, {"density": 0.4}, "sce", {"weight": None, "select_topk": 0.4}),
    "sce_all": ("sce", [1.0] * 3, {"density": 1.0}, "sce", {"weight": None}),
    "dare": (
        "dare",
        MIXED,
        {"density": 0.5, "rescale": False},
        "dare_linear",
        {"density": 0.5, "rescale": False},
    ),
    "dare_norm": ("dare", MIXED, {"density": 0.5}, "dare_linear", {"density": 0.5}),
}


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(SHAPE, generator=generator) * 0.02
    tuned = [base + torch.randn(SHAPE, generator=generator) * 0.002 for _ in range(3)]
    return {"base": base, **{f"tuned{number}": each for number, each in enumerate(tuned)}}


@pytest.fixture(scope="module")
def vectors(inputs: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> list[TaskVector]:
    folder = tmp_path_factory.mktemp("mergekit")
    for name, tensor in inputs.items():
        (folder / name).mkdir()
        save_file({"w": tensor}, folder / name / "model.safetensors")
    return [TaskVector.from_finetuned(folder / "base", folder / f"tuned{number}") for number in range(3)]


def masks(vectors: list[TaskVector]) -> list[torch.Tensor]:
    """What our DARE keeps of each vector. (An element that fine-tuning did not change counts as kept: it is 0.)"""
    alone = [combine([vector], "dare", density=0.5).dense("w") for vector in vectors]
    return [(kept != 0) | (vector.dense("w") == 0) for kept, vector in zip(alone, vectors, strict=True)]


@pytest.fixture(scope="module")
def reference(
    inputs: dict[str, torch.Tensor], vectors: list[TaskVector], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("jobs")
    jobs = {
        job: {"method": method, "parameters": {"weight": weights, **parameters}, "models": len(weights)}
        for job, (_, weights, _, method, parameters) in JOBS.items()
    }
    jobs["negated"] = {"method": "ties", "parameters": {"weight": [-1.0, 0.0, 0.0], "density": 1.0}, "models": 3}
    drawn = {
        f"{job}.mask{n}": mask.to(torch.uint8) for job in ("dare", "dare_norm") for n, mask in enumerate(masks(vectors))
    }
    save_file({**inputs, **drawn}, folder / "inputs.safetensors")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = ROOT / "tests" / "support" / "mergekit_reference.py"
    files = [folder / name for name in ("inputs.safetensors", "jobs.json", "outputs.safetensors")]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([PYTHON, script, *files], check=True, env=clean)
    return load_file(folder / "outputs.safetensors")


def merged_weights(vectors: list[TaskVector], job: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    rule, weights, options, _, _ = JOBS[job]
    change = combine(vectors[: len(weights)], rule, weights, **options).dense("w", "float64")
    return (inputs["base"].double() + change).float()


def assert_one_rounding(
    ours: torch.Tensor, theirs: torch.Tensor, inputs: dict[str, torch.Tensor], weights: list[float], units: int = 1
) -> None:
    """At most one unit of fp32 apart, at the size of the largest number that took part."""
    base = inputs["base"]
    changes = [abs(weight) * (inputs[f"tuned{n}"] - base).abs() for n, weight in enumerate(weights)]
    largest = torch.stack([base.abs(), sum(changes), theirs.float().abs()]).amax(0)
    unit = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
    assert ((ours.double() - theirs).abs() <= units * unit).all()


@pytest.mark.parametrize("job", [job for job in JOBS if job not in ("dare_norm", "linear_sum")])
def test_the_same_as_mergekit(
    job: str, vectors: list[TaskVector], inputs: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    ours, theirs = merged_weights(vectors, job, inputs), reference[job]
    # For DARE mergekit rounds each vector to fp32 before it multiplies, even if it was given fp64.
    assert_one_rounding(ours, theirs, inputs, JOBS[job][1], units=2 if job == "dare" else 1)
    assert (ours != inputs["base"]).float().mean() > 0.2  # and something was merged


def test_linear_without_normalisation_weighs_the_whole_models(
    vectors: list[TaskVector], inputs: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    """With weights that add up to 1, that is task arithmetic."""
    ours, theirs = merged_weights(vectors, "linear_sum", inputs), reference["linear_sum"]
    assert_one_rounding(ours, theirs, inputs, JOBS["linear_sum"][1])


def test_dare_is_rescaled_by_the_density_and_not_by_the_norm(
    vectors: list[TaskVector], inputs: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    """With mergekit's factor in the place of ours, the results are the same."""
    weights = JOBS["dare_norm"][1]
    factors = []
    for vector, mask in zip(vectors, masks(vectors), strict=True):
        change = vector.dense("w").double()
        factors.append((change.abs().sum() / (change * mask).abs().sum()).item())
    assert all(abs(factor / 2.0 - 1) < 0.01 and factor != 2.0 for factor in factors)
    scaled = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    change = combine(vectors, "dare", scaled, density=0.5, rescale=False).dense("w", "float64")
    ours = (inputs["base"].double() + change).float()
    # mergekit's factor is the ratio of two sums over the tensor in fp32.
    assert_one_rounding(ours, reference["dare_norm"], inputs, scaled, units=4)


def test_mergekit_adds_what_should_be_subtracted(
    vectors: list[TaskVector], inputs: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    """Why we do not divide by signed weights."""
    tuned, base = inputs["tuned0"], inputs["base"]
    assert torch.allclose(reference["negated"].float(), tuned, atol=1e-6)
    ours = combine(vectors, "ties", [-1.0, 0.0, 0.0], density=1.0, normalize="weight").dense("w")
    assert torch.allclose(base + ours, 2 * base - tuned, atol=1e-6)
