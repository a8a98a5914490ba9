"""Ranks and rows against dense fp64, for dense, low-rank and mixed vectors, in every layout."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hub_server import HubServer
from support.random_vectors import random_vector
from support.tiny_models import ARCHITECTURES, TinyModels, make, tensors, tuned_copy
from transformers import GPT2Config, GPT2LMHeadModel

from hf_taskvec import TaskVector
from hf_taskvec.algebra.matrix_kinds import KINDS
from hf_taskvec.analysis import cosine_matrix, effective_ranks, large_rows, stable_ranks
from hf_taskvec.errors import BadValueError, MismatchError


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
def test_norms_and_ranks_are_right_in_every_layout(models: TinyModels, architecture: str) -> None:
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


def test_matrices_of_cross_attention_are_not_measured() -> None:
    """It has names like those of attention, and other sizes."""
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16, add_cross_attention=True)
    model = GPT2LMHeadModel(config)
    found = stable_ranks(model)
    assert not [name for m in found.matrices for name in m.names if "cross" in name]
    assert {m.kind: m.shape[0] for m in found.matrices if m.layer == 0} == {
        "Q": 32, "K": 32, "V": 32, "O": 32, "QKV": 96, "MLP-1": 128, "MLP-2": 32
    }  # fmt: skip


def test_a_config_of_another_model_is_refused() -> None:
    vector = TaskVector.from_tensors({"gpt_neox.layers.0.attention.query_key_value.weight": torch.randn(320, 90)})
    assert {m.kind for m in stable_ranks(vector).matrices} == {"QKV"}
    with pytest.raises(MismatchError, match="320 outputs, which cannot be shared by Q, K and V in 9 equal parts"):
        stable_ranks(vector, config={"num_attention_heads": 3})


@pytest.mark.parametrize("inner", [24, 48, 96])
def test_the_architecture_tells_which_way_a_matrix_lies(inner: int) -> None:
    config = GPT2Config(n_layer=1, n_embd=48, n_head=2, vocab_size=50, n_positions=16, n_inner=inner)
    base = GPT2LMHeadModel(config)
    vector = TaskVector.from_finetuned(base, tuned_copy(base))
    (found,) = large_rows(vector)
    assert len(found.norms) == inner
    shapes = {m.kind: m.shape for m in stable_ranks(vector).matrices}
    assert shapes["MLP-1"] == (inner, 48) and shapes["MLP-2"] == (48, inner)


@given(st.integers(0, 30), st.floats(1e-15, 1e15))
def test_a_stable_rank_is_bounded_and_does_not_depend_on_the_scale(seed: int, scale: float) -> None:
    """Between 1 and the root of the smaller side, whatever the scale; 1 exactly for rank 1."""
    vector = random_vector(seed, "mixed").filter(include="*q_proj*")
    (one,) = [m for m in stable_ranks(vector).matrices if m.kind == "Q"]
    (other,) = [m for m in stable_ranks(scale * vector).matrices if m.kind == "Q"]
    assert one.stable_rank * (1 + 1e-6) >= 1 and one.stable_rank <= math.sqrt(6) * (1 + 1e-6)
    assert other.stable_rank == pytest.approx(one.stable_rank, rel=1e-4)
    (flat,) = [m for m in stable_ranks(vector.compress(rank=1)).matrices if m.kind == "Q"]
    assert flat.stable_rank == pytest.approx(1, abs=1e-6)


def test_the_harmonic_mean_is_over_the_chosen_kinds() -> None:
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


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = {"a": random_vector(0, "dense"), "b": random_vector(1, "mixed")}

    def measured() -> str:
        return repr((cosine_matrix(vectors), [stable_ranks(vector) for vector in vectors.values()]))

    alone = measured()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert measured() == alone


def test_files_on_the_hub_give_the_same_as_files_here(hub: HubServer, models: TinyModels) -> None:
    """Files only: no model is loaded."""
    pair = models.pair("phi")
    for name, folder in (("me/base", pair.base), ("me/tuned", pair.tuned)):
        hub.add_repo(name, {path.name: path.read_bytes() for path in folder.iterdir()})
    assert stable_ranks("me/base").matrices == stable_ranks(pair.base).matrices
    vector = TaskVector.from_finetuned("me/base", "me/tuned", name="hub")
    assert cosine_matrix({"hub": vector, "folder": pair.vector()})["hub", "folder"] == pytest.approx(1)


def test_effective_ranks_count_singular_values_up_to_the_energy() -> None:
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
def test_an_effective_rank_is_bounded_and_grows_with_the_energy(
    seed: int, kind: str, scale: float, one: float, other: float
) -> None:
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
def test_large_rows_do_not_depend_on_the_scale_and_grow_fewer_with_the_ratio(
    seed: int, kind: str, scale: float, one: float, other: float
) -> None:
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
def test_large_rows_are_those_of_the_dense_matrix(kind: str) -> None:
    vector = random_vector(0, kind)
    name = "model.layers.0.mlp.fc1.weight"
    (found,) = large_rows(vector, ratio=0.6)
    norms = vector.dense(name, torch.float64).norm(dim=1)
    torch.testing.assert_close(found.norms, norms, rtol=1e-6, atol=1e-6)
    expected = norms >= 0.6 * norms.max()
    assert found.index.tolist() == expected.nonzero().flatten().tolist()
    assert found.share == pytest.approx(expected.double().mean().item())
    assert found.energy == pytest.approx((norms[expected].square().sum() / norms.square().sum()).item())


def test_rows_are_outputs_in_a_transposed_layer_too() -> None:
    model = make("gpt2")
    vector = TaskVector.from_finetuned(model, tuned_copy(model))
    first = large_rows(vector)[0]
    torch.testing.assert_close(first.norms, vector.dense(first.name, torch.float64).norm(dim=0))


def test_what_has_no_ranks_or_rows_is_refused() -> None:
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
