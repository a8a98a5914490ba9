"""The algebra of task vectors: a vector space, lazily, with its history written down."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kinds_of_change import KINDS, SHAPE

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.deltas import Delta, Dense, Difference, DoRA, LowRank, Rows
from hf_taskvec.algebra.provenance import Origin, Provenance
from hf_taskvec.algebra.sources import InMemory, RowsOf, Source
from hf_taskvec.algebra.sums import Term


@dataclass(frozen=True)
class Case:
    """A vector and its value in fp64."""

    vector: TaskVector
    value: dict[str, torch.Tensor]


@st.composite
def cases(draw: st.DrawFn, label: str = "v") -> Case:
    """A vector over one or two parameters, each changed by one to three terms of any kind."""
    terms: dict[str, list[Term]] = {}
    value: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(st.sampled_from(["a.weight", "b.weight"]), min_size=1, unique=True)):
        terms[name], value[name] = [], torch.zeros(SHAPE, dtype=torch.float64)
        for kind in draw(st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=3)):
            delta, dense = KINDS[kind](torch.Generator().manual_seed(draw(st.integers(0, 999))))
            weight = draw(WEIGHTS)
            terms[name].append(Term(weight, delta))
            value[name] += weight * dense
    return Case(TaskVector(terms, Provenance.of(Origin(label, "drawn"))), value)


WEIGHTS = st.sampled_from([1.0, -1.0, 0.5, -0.6, 0.2, 3.0, 1 / 3])


def assert_value(vector: TaskVector, *expected: tuple[float, Case]) -> None:
    """The vector is that combination of the cases, within fp64's rounding."""
    names = {name for _, case in expected for name in case.value}
    assert set(vector) <= names
    for name in names:
        want = torch.zeros(SHAPE, dtype=torch.float64)
        for weight, case in expected:
            want += weight * case.value.get(name, 0.0)
        got = vector.dense(name, "float64") if name in vector else torch.zeros(SHAPE, dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_change_has_its_value(kind: str) -> None:
    delta, value = KINDS[kind](torch.Generator().manual_seed(0))
    vector = TaskVector({"w": [Term(1.0, delta)]})
    torch.testing.assert_close(vector.dense("w", "float64"), value, rtol=1e-13, atol=1e-13)
    assert vector.norm() == pytest.approx(value.norm().item(), rel=1e-12)
    assert vector.shape("w") == SHAPE


@settings(max_examples=60)
@given(cases("a"), cases("b"), cases("c"), WEIGHTS, WEIGHTS)
def test_the_laws_of_a_vector_space_hold(a: Case, b: Case, c: Case, s: float, t: float) -> None:
    u, v, w = a.vector, b.vector, c.vector
    one = [(1.0, a), (1.0, b), (1.0, c)]
    assert_value((u + v) + w, *one)
    assert_value(u + (v + w), *one)
    assert_value(v + u, (1.0, b), (1.0, a))
    assert_value(sum([u, v, w]), *one)
    assert_value(u + (v - w), (1.0, a), (1.0, b), (-1.0, c))
    assert_value(s * (u + v), (s, a), (s, b))
    assert_value((s + t) * u, (s + t, a))
    assert_value(s * u + t * u, (s + t, a))
    assert_value(s * (t * u), (s * t, a))
    assert_value(u / s, (1 / s, a))
    assert_value(-u, (-1.0, a))
    assert 1.0 * u == u == -1 * -u == u * 1 == +u
    assert len(u - u) == len(u + (-u)) == len(0 * u) == 0


@settings(max_examples=60)
@given(cases("a"), cases("b"), WEIGHTS)
def test_measures_agree_with_dense_fp64(a: Case, b: Case, s: float) -> None:
    def dot(one: Case, other: Case) -> float:
        return math.fsum((x * other.value[n]).sum().item() for n, x in one.value.items() if n in other.value)

    u, v = a.vector, b.vector
    size = math.sqrt(dot(a, a) * dot(b, b))
    assert u.norm() == pytest.approx(math.sqrt(dot(a, a)), rel=1e-9, abs=1e-7)
    assert u.dot(v) == pytest.approx(dot(a, b), rel=1e-9, abs=1e-9 * size + 1e-9)
    assert (s * u).dot(v) == pytest.approx(s * dot(a, b), rel=1e-9, abs=1e-9 * size + 1e-9)
    if size > 1e-3:
        assert u.cosine(v) == pytest.approx(dot(a, b) / size, abs=1e-7)
        assert u.cosine(-2 * u) == pytest.approx(-1.0, abs=1e-9)
    for name in u:
        assert u.norms()[name] == u.norm(name) == pytest.approx(a.value[name].norm().item(), rel=1e-9, abs=1e-7)
        if name in v:
            assert u.dots(v)[name] == u.dot(v, name)


# Folding and laziness.


def vector(name: str = "v", **tensors: torch.Tensor) -> TaskVector:
    return TaskVector.from_tensors(tensors or {"w": torch.ones(2, 3)}, name=name)


def test_like_terms_are_added_up_and_dropped_if_they_cancel() -> None:
    a, b = vector("a"), vector("b")
    (term,) = (a + a)["w"].terms
    assert term.weight == 2.0
    assert term.delta is a["w"].terms[0].delta
    assert len((a + b)["w"].terms) == 2
    assert (a + b - a) == b
    assert len(a - a) == 0
    assert (a - a).norm() == 0.0
    assert (a - a) + b == b


def test_factors_are_never_touched() -> None:
    left, right = torch.randn(4, 2), torch.randn(2, 3)
    v = TaskVector.from_tensors({"w": (left, right)})
    other = TaskVector.from_tensors({"w": (torch.randn(4, 1), torch.randn(1, 3))})
    combined = -0.5 * v + 2 * other
    mine, theirs = combined["w"].terms
    assert (mine.weight, theirs.weight) == (-0.5, 2.0)
    assert mine.delta is v["w"].terms[0].delta
    assert combined.rank("w") == 3
    assert combined.is_low_rank
    assert torch.equal(mine.delta.sources[0].read(), left)


class Unreadable(Source):
    """A tensor that has a shape and must not be read."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def read(self) -> torch.Tensor:
        raise AssertionError("a tensor was read")


def phi_sized(label: str) -> TaskVector:
    """A fine-tune of Phi-1.5's parameters: 24 layers, 1.4 billion weights."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (51200, 2048), "lm_head.weight": (51200, 2048)}
    for layer in range(24):
        for name, shape in {"q_proj": (2048, 2048), "fc1": (8192, 2048), "fc2": (2048, 8192)}.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    terms = {n: [Term(1.0, Difference(Unreadable(*s), Unreadable(*s)))] for n, s in shapes.items()}
    return TaskVector(terms, Provenance.of(Origin(label, "full fine-tune")))


def test_an_expression_over_ten_large_vectors_reads_nothing() -> None:
    ten = [phi_sized(f"v{n}") for n in range(10)]
    whole = sum(0.1 * (n + 1) * v for n, v in enumerate(ten)) / 3 - ten[4]
    whole = whole.filter(include="model.layers.*").scale({re.compile(r"\.fc"): 0.5}).scale(lambda name: 2.0)
    assert len(whole) == 24 * 6
    assert len(whole["model.layers.0.fc1.weight"].terms) == 10
    assert whole.rank("model.layers.0.fc1.weight") == 2048
    assert "v7" in repr(whole)
    assert whole.nbytes > 10 * 24 * 2e7
    with pytest.raises(AssertionError, match="was read"):  # the test would notice
        whole.dense("model.layers.0.fc1.bias")


# Scaling and choosing by name.


@pytest.fixture
def layered() -> TaskVector:
    names = ["model.layers.0.mlp.weight", "model.layers.0.attn.weight", "model.layers.1.mlp.weight", "lm_head.weight"]
    return TaskVector.from_tensors({name: torch.ones(2) for name in names}, name="v")


def test_scaling_by_pattern_takes_the_first_match(layered: TaskVector) -> None:
    scaled = layered.scale({"model.layers.0.*": 0.5, re.compile("mlp"): 3.0}, default=-1.0)
    assert {name: scaled[name].terms[0].weight for name in scaled} == {
        "model.layers.0.mlp.weight": 0.5,
        "model.layers.0.attn.weight": 0.5,
        "model.layers.1.mlp.weight": 3.0,
        "lm_head.weight": -1.0,
    }


def test_scaling_by_a_function_and_by_a_number(layered: TaskVector) -> None:
    scaled = layered.scale(lambda name: 0.0 if "mlp" in name else 2.0)
    assert set(scaled) == {"model.layers.0.attn.weight", "lm_head.weight"}
    assert scaled["lm_head.weight"].terms[0].weight == 2.0
    assert layered.scale(0.5) == layered.scale(np.float32(0.5)) == layered * 0.5


def test_filter_keeps_what_is_included_and_not_excluded(layered: TaskVector) -> None:
    assert set(layered.filter(include=["*.0.*", "lm_head.weight"])) == set(layered) - {"model.layers.1.mlp.weight"}
    assert list(layered.filter(include="model.*", exclude=re.compile("mlp"))) == ["model.layers.0.attn.weight"]
    assert layered.filter() == layered
    kept, rest = layered.filter(include="*mlp*"), layered.filter(exclude="*mlp*")
    assert kept + rest == layered


@pytest.mark.parametrize("call", ["scale", "filter"])
def test_a_pattern_that_matches_nothing_is_an_error(layered: TaskVector, call: str) -> None:
    use = {"scale": lambda p: layered.scale({p: 2.0}), "filter": lambda p: layered.filter(exclude=p)}[call]
    with pytest.raises(TaskVectorError, match=r"'lm_heat\.weight' matches none of .* 4 parameters.*mean 'lm_head"):
        use("lm_heat.weight")
    with pytest.raises(TaskVectorError, match="matches none"):
        use(re.compile("^layers"))


# What is refused.


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scales_must_be_finite(scale: float) -> None:
    uses = [lambda: vector() * scale, lambda: vector().scale({"w": scale}), lambda: vector().scale(lambda _: scale)]
    for use in uses:
        with pytest.raises(TaskVectorError, match="cannot be scaled by"):
            use()


@pytest.mark.parametrize("scale", ["0.5", {"w": "x"}, {"w": None}, {"w": "0.5"}, lambda _: "0.5", None, [0.5]])
def test_scales_must_be_numbers(scale: object) -> None:
    with pytest.raises(TaskVectorError, match=r"cannot be scaled by .*: give a number"):
        vector().scale(scale)  # type: ignore[arg-type]


def test_scales_that_overflow_together_are_refused() -> None:
    with pytest.raises(TaskVectorError, match=r"w: .*weight"):
        1e200 * (1e200 * vector())


def test_division_by_zero_is_refused() -> None:
    with pytest.raises(TaskVectorError, match="divided by 0"):
        vector() / 0


@pytest.mark.parametrize("other", ["text", None, [1], torch.ones(2)])
def test_other_operands_are_type_errors(other: object) -> None:
    for operation in (lambda v: v + other, lambda v: v - other, lambda v: v * other, lambda v: v / other):
        with pytest.raises(TypeError):
            operation(vector())


def test_numpy_numbers_scale_from_both_sides() -> None:
    for number in (np.float64(0.5), np.float32(0.5), np.linspace(0.5, 1, 2)[0]):
        v = vector()
        assert isinstance(number * v, TaskVector)
        assert number * v == v * number == 0.5 * v


def test_other_shapes_do_not_add() -> None:
    with pytest.raises(TaskVectorError, match=r"fc\.weight: shapes \[2, 2\] and \[2, 3\].*different shapes"):
        TaskVector.from_tensors({"fc.weight": torch.ones(2, 2)}) + TaskVector.from_tensors(
            {"fc.weight": torch.ones(2, 3)}
        )
    with pytest.raises(TaskVectorError, match=r"wte\.weight.*vocabulary sizes differ.*vocabulary="):
        TaskVector.from_tensors({"wte.weight": torch.ones(5, 2)}).dot(
            TaskVector.from_tensors({"wte.weight": torch.ones(6, 2)})
        )
    with pytest.raises(TaskVectorError, match=r"word_embeddings\.weight.*vocabulary sizes differ"):
        vector(**{"word_embeddings.weight": torch.ones(5, 2)}) + vector(**{"word_embeddings.weight": torch.ones(6, 2)})
    with pytest.raises(TaskVectorError, match=r"embed_positions\.weight.*different shapes"):
        vector(**{"embed_positions.weight": torch.ones(5, 2)}) + vector(**{"embed_positions.weight": torch.ones(6, 2)})
    one, other = vector(w=torch.ones(2, 3)), vector(w=torch.ones(3, 2))
    for measure in (one.dot, one.cosine):
        with pytest.raises(TaskVectorError, match=r"w: shapes \[2, 3\] and \[3, 2\]"):
            measure(other, "w")


def test_an_unknown_parameter_is_named_with_a_suggestion() -> None:
    for use in (lambda v: v["fc1.wight"], lambda v: v.dense("fc1.wight"), lambda v: v.norm("fc1.wight")):
        with pytest.raises(TaskVectorError, match=r"no parameter 'fc1\.wight'\. Did you mean 'fc1\.weight'\?$"):
            use(TaskVector.from_tensors({"fc1.weight": torch.ones(2)}))


def test_the_cosine_of_nothing_is_refused() -> None:
    with pytest.raises(TaskVectorError, match="norm 0"):
        vector().cosine(vector() * 0)


def test_from_tensors_refuses_what_is_not_a_change() -> None:
    with pytest.raises(TaskVectorError, match=r"w: .*floating-point, not torch\.int64"):
        vector(w=torch.ones(2, dtype=torch.int64))
    with pytest.raises(TaskVectorError, match=r"w: .*torch\.float8_e4m3fn"):
        vector(w=torch.ones(2).to(torch.float8_e4m3fn))
    with pytest.raises(TaskVectorError, match=r"w: .*\[4, 2\].*\[3, 4\].*cannot be multiplied"):
        TaskVector.from_tensors({"w": (torch.ones(4, 2), torch.ones(3, 4))})
    with pytest.raises(TaskVectorError, match=r"w: .*two factors"):
        TaskVector.from_tensors({"w": (torch.ones(4, 2),)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Difference(InMemory(torch.ones(2, 3)), InMemory(torch.ones(3))),
        lambda: Dense((InMemory(torch.ones(2)), InMemory(torch.ones(3)))),
        lambda: Dense(()),
        lambda: LowRank(InMemory(torch.ones(2)), InMemory(torch.ones(2, 2))),
        lambda: Rows((0, 9), Dense((InMemory(torch.ones(2, 3)),)), 5),
        lambda: Rows((0, -1), Dense((InMemory(torch.ones(2, 3)),)), 5),
        lambda: Rows((0,), Dense((InMemory(torch.ones(2, 3)),)), 5),
        lambda: Rows(range(3, 6), Dense((InMemory(torch.ones(3, 3)),)), 5),
        lambda: _dora_of(magnitude=torch.ones(3)),
        lambda: _dora_of(base=torch.ones(2, 2)),
        lambda: _dora_of(axis=2),
    ],
)
def test_a_change_that_contradicts_itself_cannot_be_made(make: Callable[[], Delta]) -> None:
    with pytest.raises(TaskVectorError, match=r"shape|rows|axis"):
        make()


def _dora_of(base: torch.Tensor | None = None, magnitude: torch.Tensor | None = None, axis: int = 0) -> DoRA:
    low_rank = LowRank(InMemory(torch.ones(4, 1)), InMemory(torch.ones(1, 3)))
    base = torch.ones(4, 3) if base is None else base
    return DoRA(InMemory(base), low_rank, InMemory(torch.ones(4) if magnitude is None else magnitude), axis)


# A value.


def test_vectors_are_immutable() -> None:
    tensor = torch.ones(2)
    v = vector(w=tensor)
    before = hash(v)
    tensor.zero_()
    assert v.dense("w").tolist() == [1, 1]
    with pytest.raises(TypeError):
        v["w"] = ()  # type: ignore[index]
    with pytest.raises(AttributeError):
        v["w"].terms[0].weight = 2.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        v.expression = "w"  # type: ignore[misc]
    v.dense("w").zero_()
    v.discarded["w"] = 1.0  # type: ignore[index]
    assert v.dense("w").tolist() == [1, 1]
    assert not v.discarded
    w = v
    w += v
    assert v["w"].terms[0].weight == 1.0
    assert hash(v) == before


def test_equal_vectors_have_equal_hashes() -> None:
    v = vector()
    assert hash(v + v) == hash(2 * v)
    assert v != vector() and v != 1
    assert len({v, 1.0 * v, -v}) == 2
    w = vector("w")
    assert v + w == w + v and hash(v + w) == hash(w + v)
    assert v - w != w - v and v + 2 * w != 2 * v + w


def test_a_vector_is_a_mapping_in_the_order_of_its_parameters() -> None:
    v = TaskVector.from_tensors({"b": torch.ones(2), "a": torch.ones(2)})
    assert list(v) == ["b", "a"]
    assert "a" in v and "c" not in v
    assert v.get("c") is None
    assert dict(v.items())["a"] == v["a"]


# History.


@pytest.mark.parametrize(
    ("build", "expression"),
    [
        (lambda a, b: -0.6 * a + 0.2 * b, "-0.6*a + 0.2*b"),
        (lambda a, b: a - b, "a - b"),
        (lambda a, b: a + (b - a) + a, "b + a"),
        (lambda a, b: a - a, "0"),
        (lambda a, b: (a + b) / 2, "0.5*a + 0.5*b"),
        (lambda a, b: -(a.filter(include="w") - b), "-filter(a, include=['w']) + b"),
        (lambda a, b: (a - b).scale({"w": 0.5}), "scale(a - b, by={'w': 0.5})"),
        (lambda a, b: a.scale({"w": np.float32(0.5)}), "scale(a, by={'w': 0.5})"),
        (lambda a, b: (a + b).compress(rank=1), "compress(a + b, rank=1)"),
        (lambda a, b: a.compress(rank=np.int64(1)), "compress(a, rank=1)"),
        (lambda a, b: a.compress(energy=np.float32(0.5), exact=True), "compress(a, energy=0.5, exact=True)"),
        (lambda a, b: (a - b).named("diff") * 2, "2*diff"),
        (lambda a, b: sum([a, b, a]), "2*a + b"),
    ],
)
def test_the_expression_is_kept(build: Callable[[TaskVector, TaskVector], TaskVector], expression: str) -> None:
    assert build(vector("a"), vector("b")).expression == expression


def test_different_vectors_of_one_name_stay_apart() -> None:
    a, b, c = (vector("hp", w=torch.full((2,), float(n))) for n in range(1, 4))
    assert (a - b).expression == "hp - hp_2"
    assert (a + b + c).expression == "hp + hp_2 + hp_3"
    assert (c + (a + b)).expression == "hp + hp_3 + hp_2"
    assert (b.filter(include="w") - a).expression == "filter(hp, include=['w']) - hp_2"
    assert [o.label for o in (a + b).provenance.origins] == ["hp", "hp_2"]


def test_different_functions_of_one_vector_stay_apart() -> None:
    v = TaskVector.from_tensors({"a": torch.ones(4, 4), "b": torch.ones(4, 4)}, name="v")
    one, other = v.scale(lambda n: 1.0 + (n == "a")), v.scale(lambda n: 1.0 + (n == "b"))
    assert len(one - other) == 2
    assert (one - other).expression != "0"
    rounded = v.compress(rank=1, dtype="bfloat16") - v.compress(rank=1)
    assert rounded.expression != "0"


def test_provenance_survives_json() -> None:
    v = (vector("a") - 0.1 * vector("b")).filter(include="*") + vector("c")
    again = Provenance.from_json(v.provenance.to_json())
    assert again == v.provenance
    assert again.expression == v.expression


def test_repr_tells_what_is_in_it() -> None:
    low = TaskVector.from_tensors(
        {"q": (torch.ones(4, 2), torch.ones(2, 4)), "k": (torch.ones(4, 1), torch.ones(1, 4))}, name="lora"
    )
    text = repr(low - 0.5 * vector("dense"))
    assert "TaskVector(lora - 0.5*dense)" in text
    assert "3 parameters: 2 low-rank (rank 1–2), 1 dense" in text
    assert "given as tensors" in text
    assert "B" in text.splitlines()[1]
    assert "TaskVector(0)" in repr(low - low)


def test_nbytes_counts_each_tensor_once() -> None:
    v = vector(w=torch.ones(10))
    assert (v + v).nbytes == v.nbytes == 40
    assert (v + vector(w=torch.ones(10, dtype=torch.float64))).nbytes == 120
    rows = InMemory(torch.ones(4, 2))
    shared = [Term(1.0, Rows(range(k, k + 1), Dense((RowsOf(rows, range(k, k + 1)),)), 4)) for k in (0, 2)]
    assert TaskVector({"w": shared}).nbytes == 32
