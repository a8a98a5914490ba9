"""Cosines, ranks and rows against dense fp64, for dense, low-rank and mixed vectors, in every layout."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hub_server import HubServer
from support.tiny_models import ARCHITECTURES, TinyModels, make, tensors, tuned_copy
from transformers import GPT2Config, GPT2LMHeadModel

from hf_taskvec import TaskVector
from hf_taskvec.algebra.tiles import tile_rows
from hf_taskvec.analysis import cosine_matrix, effective_ranks, large_rows, ranks, spectral_norm, stable_ranks
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.matrix_kinds import KINDS, place_of
from hf_taskvec.threads import workers

SHAPES = {
    "model.layers.0.mlp.fc1.weight": (12, 6),
    "model.layers.0.self_attn.q_proj.weight": (6, 6),
    "model.layers.1.mlp.fc2.weight": (6, 12),
    "model.norm.weight": (6,),
}


def random_vector(seed: int, kind: str, size: float = 1.0) -> TaskVector:
    """A dense, a low-rank or a mixed vector; the mixed one leaves a parameter out and sums terms."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return size * torch.randn(*shape, generator=generator)

    dense = {n: draw(*s) for n, s in SHAPES.items()}
    low = {n: (draw(s[0], 2), draw(2, s[1])) for n, s in SHAPES.items() if len(s) == 2}
    if kind == "dense":
        return TaskVector.from_tensors(dense, name=f"d{seed}")
    if kind == "low-rank":
        return TaskVector.from_tensors(low, name=f"l{seed}")
    del dense["model.layers.0.mlp.fc1.weight"]
    both = TaskVector.from_tensors(dense, name=f"d{seed}") - 0.5 * TaskVector.from_tensors(low, name=f"l{seed}")
    return both + TaskVector.from_tensors(low, name=f"m{seed}")


def flat(vector: TaskVector, names: list[str]) -> torch.Tensor:
    parts = [vector.dense(n, torch.float64) if n in vector else torch.zeros(SHAPES[n]) for n in names]
    return torch.cat([part.flatten().double() for part in parts])


@given(st.lists(st.sampled_from(["dense", "low-rank", "mixed"]), min_size=2, max_size=4), st.integers(0, 100))
def test_cosines_are_those_of_the_dense_vectors(kinds: list[str], seed: int) -> None:
    vectors = [random_vector(seed + i, kind) for i, kind in enumerate(kinds)]
    matrix = cosine_matrix(vectors)
    groups = {
        None: list(SHAPES),
        "0": [n for n in SHAPES if ".0." in n],
        "1": [n for n in SHAPES if ".1." in n],
        "outside": ["model.norm.weight"],
    }
    for layer, names in groups.items():
        rows = torch.stack([flat(v, names) for v in vectors])
        norms = rows.norm(dim=1)
        expected = (rows @ rows.T) / (norms[:, None] * norms)
        if layer in (None, *matrix.by_layer):
            found = matrix.total if layer is None else matrix.by_layer[layer]
            torch.testing.assert_close(
                torch.tensor(found, dtype=torch.float64), expected, atol=1e-7, rtol=0, equal_nan=True
            )
            own = matrix.norms if layer is None else matrix.layer_norms[layer]
            torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), norms, atol=1e-6, rtol=1e-6)
    assert vectors[0].cosine(vectors[1]) == pytest.approx(matrix.total[0][1], abs=1e-12)
    for name, found in matrix.by_parameter.items():
        rows = torch.stack([flat(v, [name]) for v in vectors])
        expected = torch.nn.functional.cosine_similarity(rows[:, None], rows, dim=2)
        expected[(rows == 0).all(dim=1)] = expected[:, (rows == 0).all(dim=1)] = math.nan
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), expected, atol=1e-7, rtol=0, equal_nan=True
        )


@given(st.floats(0.01, 100), st.integers(0, 20))
def test_cosines_do_not_depend_on_scales(scale: float, seed: int) -> None:
    a, b = random_vector(seed, "mixed"), random_vector(seed + 1, "dense")
    before = cosine_matrix({"a": a, "b": b})
    after = cosine_matrix({"a": scale * a, "b": -b})
    assert after["a", "b"] == after["b", "a"] == pytest.approx(-before["a", "b"], abs=1e-9)
    assert after.norms[0] == pytest.approx(scale * before.norms[0])
    assert after["a", "a"] == 1 and abs(after["a", "b"]) <= 1


def test_a_base_is_shared_by_many(models: TinyModels) -> None:
    pair = models.pair("phi")
    one = pair.vector(name="one")
    matrix = cosine_matrix([one, -2 * one, one])
    assert matrix.names == ("one", "-2*one", "one (2)")
    assert matrix["one", "-2*one"] == pytest.approx(-1, abs=1e-12) and matrix["one", "one (2)"] == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(models: TinyModels, dtype: torch.dtype) -> None:
    """They go through fp32: small differences of larger weights."""
    vector = models.pair("phi", dtype).vector(name="one")
    other = vector.filter(exclude="*bias") * 0.3
    part = torch.cat([vector.dense(n, torch.float64).flatten() * (n in other) for n in vector])
    whole = torch.cat([vector.dense(n, torch.float64).flatten() for n in vector])
    matrix = cosine_matrix([vector, other])
    assert matrix.total[0][1] == pytest.approx((part.norm() / whole.norm()).item(), abs=1e-6)
    assert matrix.norms == pytest.approx([whole.norm().item(), 0.3 * part.norm().item()], rel=1e-6)


def test_bad_vectors() -> None:
    one = random_vector(0, "dense")
    with pytest.raises(BadValueError, match="two vectors or more, not 1"):
        cosine_matrix([one])
    with pytest.raises(BadValueError, match="two vectors or more"):
        cosine_matrix(one)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="changes nothing"):
        cosine_matrix({"a": one, "b": one - one})
    zeros = TaskVector.from_tensors({name: torch.zeros(shape) for name, shape in SHAPES.items()}, name="zeros")
    with pytest.raises(BadValueError, match="zeros changes nothing"):
        cosine_matrix([one, zeros])
    with pytest.raises(BadValueError, match="is not a task vector"):
        cosine_matrix(["one", "other"])  # type: ignore[list-item]
    other = TaskVector.from_tensors({"model.norm.weight": torch.ones(7)})
    with pytest.raises(MismatchError, match="different sizes"):
        cosine_matrix([one, other])
    with pytest.raises(MissingNameError, match="Did you mean 'abc'"):
        cosine_matrix({"abc": one, "b": random_vector(1, "dense")})["abd", "b"]


def test_vectors_of_different_architectures(models: TinyModels) -> None:
    with pytest.raises(MismatchError, match="different architectures"):
        cosine_matrix([models.pair("phi").vector(), models.pair("gpt2").vector()])


# Ranks.


def plain_matrices(folder: object, architecture: str) -> dict[tuple[int, str, int | None], torch.Tensor]:
    """Every matrix by layer and kind, outputs along the rows, put together by hand from the files."""
    weights = {name: source.read().double() for name, source in tensors(folder).items()}
    out: dict[tuple[int, str, int | None], torch.Tensor] = {}
    for layer in range(2):
        own = {
            n.split(f".{layer}.", 1)[1]: w for n, w in weights.items() if f"layers.{layer}." in n or f"h.{layer}." in n
        }
        own = {n.removesuffix(".weight"): (w.T if architecture == "gpt2" else w) for n, w in own.items() if w.ndim == 2}

        def get(*names: str, own: dict[str, torch.Tensor] = own) -> list[torch.Tensor]:
            return [w for end in names for n, w in own.items() if n == end or n.endswith("." + end)]

        if architecture == "gpt2":
            q, k, v = get("c_attn")[0].chunk(3)
        elif architecture == "phi3":
            q, k, v = get("qkv_proj")[0].split([16, 16, 16])
        elif architecture == "gpt_neox":
            heads = get("query_key_value")[0].view(2, 3, 8, 16)
            q, k, v = (heads[:, i].reshape(16, 16) for i in range(3))
        else:
            q, k, v = (get(f"{letter}_proj")[0] for letter in "qkv")
        out |= {
            (layer, "Q", None): q,
            (layer, "K", None): k,
            (layer, "V", None): v,
            (layer, "QKV", None): torch.cat([q, k, v]),
        }
        attention = ("o_proj", "out_proj", "self_attn.dense", "attention.dense", "attn.c_proj")
        out[layer, "O", None] = get(*attention)[0]
        if architecture in ("phimoe", "mixtral", "qwen3_moe"):
            first, second = (
                (("w1", "w3"), "w2") if architecture != "qwen3_moe" else (("gate_proj", "up_proj"), "down_proj")
            )
            for expert in range(2):
                out[layer, "MLP-1", expert] = torch.cat(get(*(f"experts.{expert}.{n}" for n in first)))
                out[layer, "MLP-2", expert] = get(f"experts.{expert}.{second}")[0]
        else:
            names = ("gate_up_proj", "gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h")
            out[layer, "MLP-1", None] = torch.cat(get(*names))
            out[layer, "MLP-2", None] = get("down_proj", "fc2", "fc_out", "mlp.c_proj", "dense_4h_to_h")[0]
    return out


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layout(models: TinyModels, architecture: str) -> None:
    """All seven kinds, fused or separate, from files, from a live model and of a vector."""
    pair = models.pair(architecture)
    expected = plain_matrices(pair.base, architecture)
    for where in (pair.base, make(architecture)):
        found = stable_ranks(where, tolerance=1e-7)
        assert {(m.layer, m.kind, m.expert) for m in found.matrices} == set(expected)
        for m in found.matrices:
            matrix = expected[m.layer, m.kind, m.expert]
            assert m.shape == tuple(matrix.shape)
            assert m.frobenius == pytest.approx(matrix.norm().item(), rel=1e-6)
            assert m.spectral == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-5)
    assert found.kinds == list(KINDS)
    before, after = (plain_matrices(folder, architecture) for folder in (pair.base, pair.tuned))
    config = make(architecture).config.to_dict()
    for m in stable_ranks(pair.vector(), config=config, tolerance=1e-7).matrices:
        change = after[m.layer, m.kind, m.expert] - before[m.layer, m.kind, m.expert]
        assert m.stable_rank == pytest.approx((change.norm() / torch.linalg.matrix_norm(change, 2)).item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [0, 1 << 28])
@pytest.mark.parametrize("shape", [(700, 900), (900, 700), (1100, 3)])
def test_spectral_norms_of_many_tiles(
    monkeypatch: pytest.MonkeyPatch, held: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Held or made anew in each step, as stored or calculated; a flat spectrum is the hard case."""
    monkeypatch.setattr(spectral_norm, "_HELD_BYTES", held)
    monkeypatch.setattr(spectral_norm, "_TILE", 1 << 16)
    torch.manual_seed(0)
    matrix = torch.randn(shape).to(dtype)
    assert tile_rows(shape) < shape[0] or shape[1] == 3
    name = "model.layers.0.self_attn.o_proj.weight"
    stored = TaskVector.from_tensors({name: matrix})
    for vector, factor in ((stored, 1.0), (3 * stored, 3.0), (stored + 1e-9 * stored, 1.0)):
        (found,) = stable_ranks(vector, tolerance=1e-6).matrices
        assert found.spectral == pytest.approx(factor * torch.linalg.matrix_norm(matrix.double(), 2).item(), rel=1e-3)
        assert found.frobenius == pytest.approx(factor * matrix.double().norm().item(), rel=1e-6)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with a number for each product with a matrix and its transpose."""
    made = []
    both = spectral_norm._both_products

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(1)
        return both(*args)

    monkeypatch.setattr(spectral_norm, "_both_products", counted)
    return made


@pytest.mark.parametrize("shape", [(2000, 500), (500, 2000), (1000, 1000)])
def test_a_flat_spectrum_is_not_searched_for_long(products: list[int], shape: tuple[int, int]) -> None:
    """The last digits of a random matrix's norm would take many passes over it; the first two take 14 or so."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": matrix})
    (found,) = stable_ranks(vector).matrices
    exact = torch.linalg.matrix_norm(matrix, 2).item()
    assert 0.98 * exact < found.spectral < exact * (1 + 1e-6)
    assert 14 <= len(products) <= 17
    (finer,) = stable_ranks(vector, tolerance=1e-6).matrices
    assert finer.spectral == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-43, 1e-30, 1e-14, 1e-9, 1e9, 1e14, 1e30, 1e37])
@pytest.mark.parametrize("held", [0, 1 << 28])
def test_spectral_norms_of_any_size(
    monkeypatch: pytest.MonkeyPatch, products: list[int], scale: float, held: int
) -> None:
    """Squares and fourth powers of such numbers are not fp32's, and some of their norms are not."""
    monkeypatch.setattr(spectral_norm, "_HELD_BYTES", held)
    matrix = scale * torch.randn(400, 350, generator=torch.Generator().manual_seed(0))
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": matrix})
    (found,) = stable_ranks(vector, tolerance=1e-6).matrices
    exact = matrix.double()
    assert found.spectral == pytest.approx(torch.linalg.matrix_norm(exact, 2).item(), rel=1e-3)
    assert found.frobenius == pytest.approx(exact.norm().item(), rel=1e-6)
    assert products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("held", [0, 1 << 28])
def test_the_default_dtype_changes_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, held: int) -> None:
    monkeypatch.setattr(spectral_norm, "_HELD_BYTES", held)
    matrix = 20 * torch.randn(400, 350, generator=torch.Generator().manual_seed(0))
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": matrix})
    expected = stable_ranks(vector)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert stable_ranks(vector) == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("shape", [(1, 500_000), (500_000, 1), (400, 3000), (3000, 400)])
def test_a_matrix_of_rank_one_has_stable_rank_one(shape: tuple[int, int]) -> None:
    """Equal numbers are what sums in fp32 are worst at; a stable rank is never below 1."""
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": torch.full(shape, 0.1)})
    (found,) = stable_ranks(vector).matrices
    assert 1 <= found.stable_rank < 1 + 1e-3
    assert found.frobenius == pytest.approx(torch.tensor(0.1).item() * math.prod(shape) ** 0.5, rel=1e-9)


def test_a_matrix_without_columns() -> None:
    (found,) = stable_ranks(
        TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": torch.zeros(5, 0)})
    ).matrices
    assert (found.frobenius, found.spectral) == (0, 0) and math.isnan(found.stable_rank)


def test_cross_attention_is_left_out() -> None:
    """It has names like those of attention, and other sizes."""
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16, add_cross_attention=True)
    model = GPT2LMHeadModel(config)
    found = stable_ranks(model)
    assert not [name for m in found.matrices for name in m.names if "cross" in name]
    assert {m.kind: m.shape[0] for m in found.matrices if m.layer == 0} == {
        "Q": 32, "K": 32, "V": 32, "O": 32, "QKV": 96, "MLP-1": 128, "MLP-2": 32
    }  # fmt: skip


def test_a_config_of_another_model() -> None:
    vector = TaskVector.from_tensors({"gpt_neox.layers.0.attention.query_key_value.weight": torch.randn(320, 90)})
    assert {m.kind for m in stable_ranks(vector).matrices} == {"QKV"}
    with pytest.raises(MismatchError, match="320 outputs, which cannot be shared by Q, K and V in 9 equal parts"):
        stable_ranks(vector, config={"num_attention_heads": 3})


def test_the_broken_part_of_a_stack_is_named() -> None:
    weights = {f"model.layers.0.mlp.{name}_proj.weight": torch.ones(8, 6) for name in ("gate", "up")}
    weights["model.layers.0.mlp.up_proj.weight"][3, 2] = float("nan")
    with pytest.raises(BadValueError, match=r"up_proj.weight: the weights contain NaN"):
        stable_ranks(TaskVector.from_tensors(weights))


@pytest.mark.parametrize("inner", [24, 48, 96])
def test_the_architecture_tells_which_way_a_matrix_lies(inner: int) -> None:
    config = GPT2Config(n_layer=1, n_embd=48, n_head=2, vocab_size=50, n_positions=16, n_inner=inner)
    base = GPT2LMHeadModel(config)
    vector = TaskVector.from_finetuned(base, tuned_copy(base))
    (found,) = large_rows(vector)
    assert len(found.norms) == inner
    shapes = {m.kind: m.shape for m in stable_ranks(vector).matrices}
    assert shapes["MLP-1"] == (inner, 48) and shapes["MLP-2"] == (48, inner)


def test_a_spectrum_with_a_gap_settles_soon(monkeypatch: pytest.MonkeyPatch, products: list[int]) -> None:
    monkeypatch.setattr(spectral_norm, "_SMALL", 0)
    (found,) = stable_ranks(
        TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": with_values(3.0, *torch.linspace(1, 2, 99))})
    ).matrices
    assert found.spectral == pytest.approx(3, rel=1e-4)
    assert len(products) < 10


def test_spectral_norms_of_a_real_model(shared: Path) -> None:
    """Real matrices have a few large singular values: nearly all norms are right to four digits, all to two."""
    folder = shared / "models" / "stories15M"
    tensors = open_checkpoint(folder).tensors
    errors = []
    for matrix in stable_ranks(folder).matrices:
        weight = torch.cat([tensors[name].read() for name in matrix.names])
        errors.append(1 - matrix.spectral / torch.linalg.matrix_norm(weight.double(), 2).item())
    assert min(errors) > -1e-6 and max(errors) < 0.02
    assert sum(error < 1e-4 for error in errors) >= 0.9 * len(errors)


def test_a_thread_keeps_its_room() -> None:
    room = spectral_norm.Room()
    first = room.of((30, 20))
    assert first.shape == (30, 20)
    assert room.of((10, 50)).data_ptr() == first.data_ptr()
    assert room.of((40, 50)).shape == (40, 50)
    others = []
    thread = threading.Thread(target=lambda: others.append(room.of((3, 2)).data_ptr()))
    thread.start()
    thread.join()
    assert others != [room.of((3, 2)).data_ptr()]


def with_values(*values: float) -> torch.Tensor:
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randn(side, len(values), dtype=torch.float64, generator=generator) for side in (150, 120)]
    left, right = (torch.linalg.qr(side).Q for side in sides)
    return ((left * torch.tensor(values)) @ right.T).float()


def hidden(value: float, size: int = 4096) -> torch.Tensor:
    """The identity but for one direction, of which the search's first vector holds next to nothing."""
    first = torch.randn(size, generator=torch.Generator().manual_seed(0))
    diagonal = torch.ones(size)
    diagonal[first.abs().argmin()] = value
    return torch.diag(diagonal)


@pytest.mark.parametrize(
    ("matrix", "largest"),
    [
        (torch.eye(100), 1.0),
        (torch.zeros(50, 40).index_put_((torch.tensor(2), torch.tensor(3)), torch.tensor(5.0)), 5.0),
        (torch.ones(60, 50), 3000**0.5),
        (with_values(3.0, 1.0), 3.0),
        (with_values(1.05, *[1.0] * 99), 1.05),
        (with_values(1e-3, *[9.99e-4] * 50), 1e-3),
        (hidden(1.05), 1.05),
    ],
    ids=["identity", "one number", "one row", "two values", "one above", "one hardly above", "one hidden"],
)
@pytest.mark.parametrize("tolerance", [1e-4, 1e-9])
@pytest.mark.parametrize("small", [0, 320])
def test_spectral_norms_where_the_search_runs_out_of_directions(
    monkeypatch: pytest.MonkeyPatch, matrix: torch.Tensor, largest: float, tolerance: float, small: int
) -> None:
    """Few different singular values: soon all directions are found, and what is left of a step is rounding."""
    monkeypatch.setattr(spectral_norm, "_SMALL", small)
    name = "model.layers.0.self_attn.o_proj.weight"
    (found,) = stable_ranks(TaskVector.from_tensors({name: matrix}), tolerance=tolerance).matrices
    assert found.spectral == pytest.approx(largest, rel=1e-6)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = {"a": random_vector(0, "dense"), "b": random_vector(1, "mixed")}

    def measured() -> str:
        return repr((cosine_matrix(vectors), [stable_ranks(vector) for vector in vectors.values()]))

    alone = measured()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert measured() == alone


@pytest.mark.parametrize(("total", "expected"), [(10_000, 1), (4 * 60 * 50 * 3, 3), (1 << 29, 8)])
def test_few_threads_hold_large_matrices(monkeypatch: pytest.MonkeyPatch, total: int, expected: int) -> None:
    """What all threads hold stays within a budget, however many torch has."""
    used = []

    def watched(threads: int) -> object:
        used.append(threads)
        return workers(1)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(ranks, "workers", watched)
    monkeypatch.setattr(spectral_norm, "_TOTAL_BYTES", total)
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)]
    dense = TaskVector.from_tensors({name: torch.ones(60, 50) for name in names})
    low = TaskVector.from_tensors({name: (torch.ones(60, 1), torch.ones(1, 50)) for name in names})
    for vector in (dense, low):
        stable_ranks(vector, progress=False)
    monkeypatch.setattr(spectral_norm, "_HELD_BYTES", 0)
    stable_ranks(dense, progress=False)
    assert used == [expected, 8, 8]  # factors and tiles take no room


@given(st.integers(0, 30), st.floats(1e-15, 1e15))
def test_stable_rank_properties(seed: int, scale: float) -> None:
    """Between 1 and the root of the smaller side, whatever the scale; 1 exactly for rank 1."""
    vector = random_vector(seed, "mixed").filter(include="*q_proj*")
    (one,) = [m for m in stable_ranks(vector).matrices if m.kind == "Q"]
    (other,) = [m for m in stable_ranks(scale * vector).matrices if m.kind == "Q"]
    assert one.stable_rank * (1 + 1e-6) >= 1 and one.stable_rank <= math.sqrt(6) * (1 + 1e-6)
    assert other.stable_rank == pytest.approx(one.stable_rank, rel=1e-4)
    (flat,) = [m for m in stable_ranks(vector.compress(rank=1)).matrices if m.kind == "Q"]
    assert flat.stable_rank == pytest.approx(1, abs=1e-6)


def test_low_rank_norms_are_exact_and_so_are_those_of_stacks() -> None:
    torch.manual_seed(0)
    names = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"]
    factors = {name: (torch.randn(40, 3), torch.randn(3, 30)) for name in names}
    vector = TaskVector.from_tensors(factors)
    found = {m.kind: m for m in stable_ranks(vector).matrices}
    stacked = torch.cat([vector.dense(name, torch.float64) for name in names])
    assert found["QKV"].spectral == pytest.approx(torch.linalg.matrix_norm(stacked, 2).item(), rel=1e-12)
    assert found["QKV"].frobenius == pytest.approx(stacked.norm().item(), rel=1e-12)


def test_harmonic_mean() -> None:
    found = stable_ranks(random_vector(0, "dense"))
    chosen = [m.stable_rank for m in found.matrices if m.kind in ("QKV", "MLP-1", "MLP-2")]
    assert found.harmonic_mean() == pytest.approx(len(chosen) / sum(1 / r for r in chosen))
    assert found.harmonic_mean(["MLP-2"]) == found.of_kind("MLP-2")[0].stable_rank
    assert found.harmonic_mean("MLP-2") == found.harmonic_mean(["MLP-2"])
    with pytest.raises(BadValueError, match="no matrix of the kinds"):
        found.harmonic_mean([])
    with pytest.raises(BadValueError, match="'qkv' is no kind"):
        found.harmonic_mean(["qkv"])  # type: ignore[list-item]
    with pytest.raises(BadValueError, match="no matrix of the kinds O"):
        found.harmonic_mean(["O"])


def test_effective_ranks() -> None:
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(20, 5)).Q, torch.linalg.qr(torch.randn(15, 5)).Q
    values = torch.tensor([10.0, 5.0, 1.0, 0.5, 0.1])
    matrix = (u * values) @ v.T
    for given_as in (matrix, (u * values, v.T.contiguous())):
        vector = TaskVector.from_tensors({"w": given_as})
        for energy in (0.5, 0.9, 0.99, 0.9999):
            shares = values.square().cumsum(0) / values.square().sum()
            expected = int((shares < energy).sum()) + 1
            assert effective_ranks(vector, energy) == {"w": expected}


@given(
    st.integers(0, 30),
    st.sampled_from(["dense", "low-rank", "mixed"]),
    st.floats(1e-6, 1e6),
    st.floats(0.05, 0.99),
    st.floats(0.05, 0.99),
)
def test_effective_rank_properties(seed: int, kind: str, scale: float, one: float, other: float) -> None:
    """At least 1, at most the rank, whatever the scale and the sign, and more energy never needs fewer."""
    vector = random_vector(seed, kind)
    less, more = (effective_ranks(vector, energy, progress=False) for energy in sorted((one, other)))
    assert effective_ranks(-scale * vector, max(one, other), progress=False) == more
    assert set(less) == set(more) == {name for name in vector if len(vector.shape(name)) == 2}
    for name in more:
        assert 1 <= less[name] <= more[name] <= vector.rank(name)
    assert set(effective_ranks(vector.compress(rank=1), 0.99, progress=False).values()) == {1}


@given(
    st.integers(0, 30),
    st.sampled_from(["dense", "low-rank"]),
    st.floats(1e-6, 1e6),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
)
def test_large_row_properties(seed: int, kind: str, scale: float, one: float, other: float) -> None:
    """The largest row is always among them, whatever the scale; a higher bar leaves fewer, which hold no more."""
    vector = random_vector(seed, kind)
    (many,), (few,) = (large_rows(vector, ratio) for ratio in sorted((one, other)))
    assert few.norms.argmax() in few.index and set(few.index.tolist()) <= set(many.index.tolist())
    assert 0 < few.share <= many.share <= 1
    assert few.share - 1e-9 <= few.energy <= many.energy + 1e-12 <= 1 + 1e-9  # large rows hold more than their share
    (scaled,) = large_rows(-scale * vector, max(one, other))
    torch.testing.assert_close(scaled.norms, scale * few.norms, rtol=1e-6, atol=0)
    borderline = (few.norms / few.threshold - 1).abs() < 1e-9
    assert set(scaled.index.tolist()) ^ set(few.index.tolist()) <= set(borderline.nonzero().flatten().tolist())


@pytest.mark.parametrize("kind", ["dense", "low-rank"])
def test_large_rows(kind: str) -> None:
    vector = random_vector(0, kind)
    name = "model.layers.0.mlp.fc1.weight"
    (found,) = large_rows(vector, ratio=0.6)
    norms = vector.dense(name, torch.float64).norm(dim=1)
    torch.testing.assert_close(found.norms, norms, rtol=1e-6, atol=1e-6)
    expected = norms >= 0.6 * norms.max()
    assert found.index.tolist() == expected.nonzero().flatten().tolist()
    assert found.share == pytest.approx(expected.double().mean().item())
    assert found.energy == pytest.approx((norms[expected].square().sum() / norms.square().sum()).item())


def test_large_rows_of_a_transposed_layer() -> None:
    model = make("gpt2")
    vector = TaskVector.from_finetuned(model, tuned_copy(model))
    first = large_rows(vector)[0]
    torch.testing.assert_close(first.norms, vector.dense(first.name, torch.float64).norm(dim=0))


def test_bad_matrices() -> None:
    with pytest.raises(BadValueError, match="known by its name"):
        stable_ranks(TaskVector.from_tensors({"w": torch.ones(2, 2)}))
    with pytest.raises(BadValueError, match="tolerance=0"):
        stable_ranks(random_vector(0, "dense"), tolerance=0)
    with pytest.raises(BadValueError, match="no first matrix of an MLP"):
        large_rows(TaskVector.from_tensors({"w": torch.ones(2, 2)}))
    with pytest.raises(BadValueError, match="'me/vector' is not a task vector"):
        large_rows("me/vector")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="ratio"):
        large_rows(random_vector(0, "dense"), ratio=0)
    with pytest.raises(BadValueError, match="NaN"):
        stable_ranks(TaskVector.from_tensors({"layers.0.mlp.fc1.weight": torch.full((2, 2), float("nan"))}))
    zero = stable_ranks(TaskVector.from_tensors({"layers.0.mlp.fc1.weight": torch.zeros(2, 2)})).matrices[0]
    assert math.isnan(zero.stable_rank)


def test_from_the_hub(hub: HubServer, models: TinyModels) -> None:
    """Files only: no model is loaded."""
    pair = models.pair("phi")
    for name, folder in (("me/base", pair.base), ("me/tuned", pair.tuned)):
        hub.add_repo(name, {path.name: path.read_bytes() for path in folder.iterdir()})
    assert stable_ranks("me/base").matrices == stable_ranks(pair.base).matrices
    vector = TaskVector.from_finetuned("me/base", "me/tuned", name="hub")
    assert cosine_matrix({"hub": vector, "folder": pair.vector()})["hub", "folder"] == pytest.approx(1)


def test_what_is_no_matrix_of_a_layer() -> None:
    for name in ("lm_head.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.gate.weight"):
        assert place_of(name) is None
