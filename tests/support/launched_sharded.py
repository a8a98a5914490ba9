"""Edits of sharded live models, beside edits of the whole model: launched_sharded.py FOLDER PART [PART ...].

`FOLDER/base` and `FOLDER/tuned` are a model and its fine-tune. Every process compares what it sees; what differs is an
error, which ends the script.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from support import tiny_models
from support.kinds_of_change import KINDS, SHAPE
from support.launch import leave_processes
from support.tiny_books import make_books, make_tokenizer, tiny_llama
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector, combine
from hf_taskvec.algebra.sums import Term
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, ChangedSourceError, TaskVectorError, UnsupportedError
from hf_taskvec.evaluation import protocols, sweep

TOKENS = torch.arange(8)[None] % 20
DTYPES = (torch.float32, torch.bfloat16)


def load(folder: Path, dtype: torch.dtype, **options: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def by_fsdp(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    model = load(folder, dtype)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def by_copies_of_fsdp(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")), load(folder, dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_tensor_parallelism(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return load(folder, dtype, tp_plan="auto")


def by_both(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers.distributed import DistributedConfig

    return load(folder, dtype, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))


def by_ddp(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(load(folder, dtype))


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight, gathered, bit for bit, under the names that the model itself has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        name.removeprefix("module."): (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in found.items():
        one, other = (torch.atleast_1d(each).contiguous().view(torch.uint8) for each in (tensor, expected[name]))
        assert torch.equal(one, other), f"{what}: {name} differs on rank {distributed.get_rank()}"


def vectors(folder: Path) -> dict[str, TaskVector]:
    full = TaskVector.from_finetuned(folder / "base", folder / "tuned")
    low = tiny_models.low_rank(load(folder / "base", torch.float32), size=0.02, exclude="norm")
    return {"full": full, "low": low, "both": 0.3 * full - 0.7 * low, "rule": combine([full, low], "ties", density=0.5)}


def check_models(folder: Path, shard: Callable[[Path, torch.dtype], torch.nn.Module]) -> None:
    for dtype in DTYPES:
        plain, model = load(folder / "base", dtype), shard(folder / "base", dtype)
        before = whole(model)
        assert_same(before, whole(plain), "as loaded")
        for name, vector in vectors(folder).items():
            for original in (None, folder / "base") if dtype == torch.float32 else (None,):
                what = f"{shard.__name__} {dtype} {name} original={original is not None}"
                with (
                    vector.applied_to(plain, -0.6) as reference,
                    vector.applied_to(model, -0.6, original=original) as edit,
                ):
                    assert_same(whole(model), whole(plain), what)
                    outputs = [each(TOKENS).logits.float() for each in (model, plain)]
                    torch.testing.assert_close(*outputs, atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)
                    reference.set_scale(1.0)
                    edit.set_scale(1.0)  # after a forward, for which FSDP gathered weights
                    assert_same(whole(model), whole(plain), what)
                    outputs = [each(TOKENS).logits.float() for each in (model, plain)]
                    torch.testing.assert_close(*outputs, atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)
                assert_same(whole(model), before, f"{what}, restored")
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits, atol=1e-2, rtol=0.02)


def check_attached(folder: Path, shard: Callable[[Path, torch.dtype], torch.nn.Module]) -> None:
    plain, model = load(folder / "base", torch.float32), shard(folder / "base", torch.float32)
    vector = vectors(folder)["low"]
    if shard in (by_tensor_parallelism, by_both):
        with expect(UnsupportedError, "tensor parallelism"):
            vector.edit(model, merge=False)
        return
    before = model(TOKENS).logits
    with vector.applied_to(plain, 0.5, merge=False), vector.applied_to(model, 0.5, merge=False) as edit:
        torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=1e-4)
        edit.set_scale(0.0)
        assert torch.equal(model(TOKENS).logits, before)
    assert torch.equal(model(TOKENS).logits, before)


def check_extraction(folder: Path, shard: Callable[[Path, torch.dtype], torch.nn.Module]) -> None:
    """A fine-tune that is live and sharded gives the vector that its folder gives."""
    expected = TaskVector.from_finetuned(folder / "base", folder / "tuned")
    live = shard(folder / "tuned", torch.float32)
    for base in (folder / "base", shard(folder / "base", torch.float32)):
        vector = TaskVector.from_finetuned(base, live)
        assert set(vector) == set(expected)
        for name in vector:
            assert torch.equal(vector.dense(name), expected.dense(name)), name
    model = shard(folder / "base", torch.float32)
    with vector.applied_to(model):
        assert_same(whole(model), whole(live), "base + vector")


def check_sweep(folder: Path, shard: Callable[[Path, torch.dtype], torch.nn.Module]) -> None:
    """A sweep of a sharded model says what one of the whole model says.

    FSDP gathers weights before it computes with them, so all of it is the same. Tensor parallelism adds up summands of
    several processes, so losses differ in their last digits.
    """
    home = folder / f"swept-by-{shard.__name__}"
    if processes().is_main_process:
        tiny_llama().save_pretrained(home)
    processes().wait_for_everyone()
    protocol = protocols.get(prompt_length=14, answer_length=8, samples=6)
    told = []
    for model in (load(home, torch.float32), shard(home, torch.float32)):
        weight = 0.3 * torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
        vector = TaskVector.from_tensors({"lm_head.weight": weight})
        options = {"tokenizer": make_tokenizer(), "resamples": 50, "permutations": 50}
        told.append(sweep(model, vector, (0, -0.5, -1), make_books(), protocol, **options))
    plain, sharded = (
        {name: report.to_dict()[name] for name in ("scores", "tests", "membership", "choice", "passages")}
        for report in told
    )
    assert len(plain["scores"]) > 20 and len(plain["passages"]) > 6
    if shard is by_fsdp:
        assert plain == sharded
    else:
        assert_near(plain["scores"], sharded["scores"], "scores")
        assert told[0].choice.reason == told[1].choice.reason


def assert_near(one: object, other: object, where: str) -> None:
    """The same, but for the last digits of numbers."""
    if isinstance(one, float) and isinstance(other, float):
        assert abs(one - other) <= 1e-4 * max(1.0, abs(one)) or one != one, (where, one, other)
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_near(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_near(*pair, f"{where}[{number}]")
    else:
        assert one == other, (where, one, other)


class Matrices(torch.nn.Module):
    """A matrix of several tiles, whose shards do not end where tiles do, and others with few rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"large": (1101, 512), "even": (48, 600), "thin": (3, 700), "flat": (5,), "cube": (4, 6, 8)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(value))


def shard_by_hand(model: torch.nn.Module, mesh: object, *placements: Placement) -> torch.nn.Module:
    for name, parameter in list(model.named_parameters(recurse=False)):
        # Interleaved parts are of one size.
        fits = [
            getattr(each, "dim", 0) < parameter.ndim
            and (not isinstance(each, _StridedShard) or parameter.shape[0] % (4 * each.split_factor) == 0)
            for each in placements
        ]
        fitting = [each if fit else Replicate() for each, fit in zip(placements, fits, strict=True)]
        model.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, fitting)))
    return model


def check_placements(count: int) -> None:
    line = init_device_mesh("cpu", (count,))
    square = init_device_mesh("cpu", (2, count // 2))
    cases = [(line, (Shard(0),)), (line, (Shard(1),)), (line, (Replicate(),)), (line, (Shard(2),))]
    cases += [(square, each) for each in ((Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1)))]
    cases += [(square, (_StridedShard(0, split_factor=2), Shard(0))), (line, (_StridedShard(0, split_factor=3),))]
    draw = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        low = {
            name: (
                torch.randn(each.shape[0], 4, generator=draw) * 0.1,
                torch.randn(4, each.shape[1], generator=draw) * 0.1,
            )
            for name, each in Matrices(dtype).named_parameters()
            if each.ndim == 2
        }
        full = {name: torch.randn(each.shape, generator=draw) for name, each in Matrices(dtype).named_parameters()}
        one, other = TaskVector.from_tensors(low), TaskVector.from_tensors(full)
        made = {"low": one, "full": other, "both": one - 0.3 * other, "rule": combine([one * 2, other], "dare", seed=1)}
        for mesh, placements in cases:
            for name, vector in made.items():
                plain, model = Matrices(dtype), shard_by_hand(Matrices(dtype), mesh, *placements)
                before, what = whole(model), f"{placements} {dtype} {name}"
                with vector.applied_to(plain, -0.7), vector.applied_to(model, -0.7):
                    assert_same(whole(model), whole(plain), what)
                assert_same(whole(model), before, what)
    for name, kind in KINDS.items():
        for placements in ((Shard(0),), (Shard(1),)):
            delta, _ = kind(torch.Generator().manual_seed(3))
            vector = TaskVector({"weight": [Term(1.0, delta)]})
            layers = [torch.nn.Linear(*reversed(SHAPE), bias=False) for _ in range(2)]
            layers[1].load_state_dict(layers[0].state_dict())
            distributed.broadcast(layers[0].weight.data, 0)
            distributed.broadcast(layers[1].weight.data, 0)
            shard_by_hand(layers[1], line, *placements)
            with vector.applied_to(layers[0], 0.4), vector.applied_to(layers[1], 0.4):
                assert_same(whole(layers[1]), whole(layers[0]), f"{name} {placements}")


@contextmanager
def expect(kind: type[TaskVectorError], words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"nothing was refused for {words!r}")


def check_experts(folder: Path, shard: Callable[[Path, torch.dtype], torch.nn.Module]) -> None:
    """A mixture of experts: each process finds the stored experts in its pieces of the live ones."""
    home = folder / "experts"
    if processes().is_main_process:
        base = tiny_models.make("mixtral", num_local_experts=3)
        tiny_models.save_pair(home, base, tiny_models.tuned_copy(base))
    processes().wait_for_everyone()
    check_models(home, shard)
    check_extraction(home, shard)


def check_broken_forward(folder: Path) -> None:
    """An error in a forward, for which FSDP has gathered weights, is not hidden, and the model is restored."""
    model, vector = by_fsdp(folder / "base", torch.float32), vectors(folder)["full"]
    before, logits = whole(model), model(TOKENS).logits

    def fail(*_: object) -> None:
        raise ArithmeticError("in the middle")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    try:
        with vector.applied_to(model, -0.6):
            model(TOKENS)
    except ArithmeticError:
        handle.remove()
    assert_same(whole(model), before, "restored after an error in a forward")
    assert torch.equal(model(TOKENS).logits, logits)


def check_refusals(folder: Path, count: int) -> None:
    line, rank = init_device_mesh("cpu", (count,)), distributed.get_rank()
    # What is not finite in one process's part stops all of them, and all keep the λ that they had.
    model = shard_by_hand(torch.nn.Linear(4, 8, bias=False).half(), line, Shard(0))
    change = torch.ones(8, 4)
    change[0] = 60000.0
    before = whole(model)
    edit = TaskVector.from_tensors({"weight": change}).edit(model, 0.5)
    at_half = whole(model)
    with expect(BadValueError, "too large" if rank == 0 else "another process"):
        edit.set_scale(3.0)
    assert edit.scale == 0.5
    assert_same(whole(model), at_half, "after a failure")
    edit.restore()
    assert_same(whole(model), before, "after a failure, restored")
    # Summands are no parts.
    sums = DTensor.from_local(torch.ones(8, 4), line, [Partial()])
    model = torch.nn.Linear(4, 8, bias=False)
    model.weight = torch.nn.Parameter(sums)
    with expect(UnsupportedError, "Partial"):
        TaskVector.from_tensors({"weight": change}).edit(model)
    # torch's own tensor parallelism.
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False))
    parallelize_module(model, line, {"0": ColwiseParallel()})
    with expect(UnsupportedError, "tensor parallelism"):
        TaskVector.from_tensors({"0.weight": (torch.ones(8, 1), torch.ones(1, 4))}).edit(model, merge=False)
    wrong = TaskVector.from_finetuned(folder / "base", folder / "tuned").edit
    with expect(ChangedSourceError, "not what the live model"):
        wrong(by_fsdp(folder / "base", torch.float32), original=folder / "tuned")
    # What one process finds wrong in its part, all refuse.
    model, other = by_fsdp(folder / "base", torch.float32), folder / "another-last-row"
    if rank == 0:
        changed = load(folder / "base", torch.float32)
        changed.lm_head.weight.data[-1] += 1
        changed.save_pretrained(other)
    distributed.barrier()
    before = whole(model)
    with expect(
        *((BadValueError, "another process") if rank == 0 else (ChangedSourceError, "not what the live model"))
    ):
        wrong(model, original=other)
    assert_same(whole(model), before, "after an edit that did not begin")


def main(folder: Path, *parts: str) -> None:
    count = processes().num_processes
    ways = {each.__name__: each for each in (by_fsdp, by_tensor_parallelism, by_ddp, by_copies_of_fsdp, by_both)}
    for part in parts:
        if part == "placements":
            check_placements(count)
        elif part == "refusals":
            check_refusals(folder, count)
            check_broken_forward(folder)
        elif part.startswith("experts_"):
            check_experts(folder, ways[part.removeprefix("experts_")])
        else:
            shard = ways[part]
            check_models(folder, shard)
            check_attached(folder, shard)
            check_extraction(folder, shard)
            if shard in (by_fsdp, by_tensor_parallelism):
                check_sweep(folder, shard)
    if processes().is_main_process:
        print("all the same")
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
