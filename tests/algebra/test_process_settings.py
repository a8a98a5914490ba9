"""Results do not hang on what a process has set in torch: threads, default device and dtype, flushed subnormals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.tiny_models import make, save_pair, tensors, tuned_copy

from hf_taskvec import TaskVector, combine
from hf_taskvec.analysis import cosine_matrix

# The first is decomposed by a random sketch, on which the number of threads showed most.
SHAPES = {"h.0.mlp.fc1.weight": (540, 700), "h.0.attn.weight": (40, 30), "h.0.bias": (30,), "gain": ()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        yield
        assert 5e-324 * torch.get_num_threads() == 0.0  # it is still set
    finally:
        torch.set_flush_denormal(False)


SETTINGS = {
    "two threads": lambda: threads(2),
    "a default device": lambda: torch.device("meta"),
    "fp16 by default": lambda: default_dtype(torch.float16),
    "fp64 by default": lambda: default_dtype(torch.float64),
    "flushed subnormals": flushed,
}


def changes(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Some of them subnormal in fp32 and bf16."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    found["h.0.bias"] *= 1e-39
    return {name: each.to(dtype) for name, each in found.items()}


RESULTS: dict[str, Callable[[TaskVector, TaskVector], TaskVector]] = {
    "sum": lambda a, b: a - 0.3 * b,
    "sketch": lambda a, b: a.compress(rank=8),
    "energy": lambda a, b: (a + b).compress(energy=0.5),
    "exact": lambda a, b: a.filter(include="*attn*").compress(rank=8, exact=True),
    "factors": lambda a, b: (a.compress(rank=4) - b.compress(rank=3)).compress(rank=5),
    "rows": lambda a, b: a.prune_rows(0.3),
    "without": lambda a, b: a.without([b, 0.5 * b]),
    "subspace": lambda a, b: a.without(b, by="subspace", rank=3),
    "factors without": lambda a, b: a.compress(rank=4).without(b.compress(rank=3), by="subspace"),
    **{
        rule: lambda a, b, rule=rule: combine([a, b], rule)  # type: ignore[misc]
        for rule in ("ties", "dare", "magnitude", "breadcrumbs", "low_rank", "tsv")
    },
}


def measures(a: TaskVector, b: TaskVector) -> list[object]:
    return [a.norm(), a.dot(b), a.norms(), a.dots(b), cosine_matrix([a, b])]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_and_measures_are_the_same(tmp_path: Path, setting: str, dtype: torch.dtype) -> None:
    given = [changes(seed, dtype) for seed in range(2)]

    def results(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
        a, b = (TaskVector.from_tensors(each, name=name) for each, name in zip(given, "ab", strict=True))
        made = {key: build(a, b) for key, build in RESULTS.items()}
        made["loaded"] = TaskVector.load((a - 0.3 * b).save(folder))
        return {key: {name: v.dense(name, "float64") for name in v} for key, v in made.items()}

    def measured() -> list[object]:
        return measures(*(TaskVector.from_tensors(each, name=name) for each, name in zip(given, "ab", strict=True)))

    expected, numbers = results(tmp_path / "plain"), measured()
    assert expected["sum"]["h.0.bias"].any()
    with SETTINGS[setting]():
        found, other_numbers = results(tmp_path / "set"), measured()
    for key, dense in expected.items():
        for name, tensor in dense.items():
            assert torch.equal(found[key][name], tensor), (key, name)
    assert other_numbers == numbers


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_fine_tune_is_extracted_and_applied_the_same(tmp_path: Path, setting: str) -> None:
    base = make("llama", torch.bfloat16)
    tuned = tuned_copy(base)
    with torch.no_grad():
        tuned.model.norm.weight[:4] = torch.tensor([1e-39, -1e-40, 0.0, 1e-38], dtype=torch.float32)
        base.model.norm.weight[:4] = torch.tensor([2e-39, 1e-40, 1e-39, 3e-38], dtype=torch.float32)
    pair = save_pair(tmp_path, base, tuned)
    pair.vector().apply(pair.base, tmp_path / "plain", scale=-0.6)
    with SETTINGS[setting]():
        TaskVector.load(pair.vector().save(tmp_path / "vector")).apply(pair.base, tmp_path / "set", scale=-0.6)
        TaskVector.from_finetuned(base, tuned).apply(pair.base, tmp_path / "live", scale=-0.6)
        pair.vector().apply(pair.base, tmp_path / "one")
    for name, source in tensors(tmp_path / "plain").items():
        for folder in ("set", "live"):
            assert torch.equal(tensors(tmp_path / folder)[name].read(), source.read()), (folder, name)
        assert torch.equal(tensors(tmp_path / "one")[name].read(), tensors(pair.tuned)[name].read()), name
