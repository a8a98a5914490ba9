"""Task correlation: eq. (11) against a plain computation in fp64, and its properties."""

import copy
import weakref

import numpy
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import ARCHITECTURES, EXPERTS, make, shake, tuned_copy
from support.token_rows import rows
from transformers import BatchEncoding

from hf_taskvec import TaskVector
from hf_taskvec.analysis import (
    EditedModel,
    correlation_matrix,
    correlation_proxy,
    correlations,
    recommend_scales,
    task_correlation,
)
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError
from hf_taskvec.models import model_facts


def plainly(
    a: torch.nn.Module,
    b: torch.nn.Module,
    data: list[list[int]],
    pooling: str,
    seed: int = 0,
    base: torch.nn.Module | None = None,
) -> float:
    """Eq. (11) on one data set, row by row and all at once; of log-probabilities less a base's, if there is one."""
    outputs = []
    for model in (a, b):
        found = []
        for number, row in enumerate(data):
            with torch.no_grad():
                logits = model(torch.tensor([row])).logits[0].double()
                if base is not None:
                    logits = logits.log_softmax(-1) - base(torch.tensor([row])).logits[0].double().log_softmax(-1)
            if pooling == "last":
                found.append(logits[-1])
            elif pooling == "mean":
                found.append(logits.mean(0))
            else:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
                found += list(logits[torch.randperm(len(row), generator=generator)[:16].sort().values])
        stacked = torch.stack(found)
        outputs.append(stacked - stacked.mean(0))
    return torch.cosine_similarity(*outputs, dim=1).mean().item()


@pytest.fixture(scope="module")
def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    base = make("phi")
    return tuned_copy(base, 0.2, seed=1), tuned_copy(base, 0.2, seed=2)


@pytest.mark.parametrize("pooling", ["last", "mean", "sample"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_correlation_is_equation_11(pair, pooling: str, batch_size: int) -> None:
    a, b = pair
    found = task_correlation(a, b, rows(0), rows(1), pooling=pooling, batch_size=batch_size)
    assert found.on_a == pytest.approx(plainly(a, b, rows(0), pooling), abs=1e-6)
    assert found.on_b == pytest.approx(plainly(a, b, rows(1), pooling), abs=1e-6)
    assert found.value == (found.on_a + found.on_b) / 2
    assert float(found) == found.value


@pytest.mark.parametrize("pooling", ["last", "mean", "sample"])
@pytest.mark.parametrize("held", [1, 1 << 20])
def test_relative_to_a_base_it_is_that_of_what_changed(
    pair, monkeypatch: pytest.MonkeyPatch, pooling: str, held: int
) -> None:
    """In one pass or in two, and whether the fine-tunes are models or vectors on the base."""
    base, (a, b) = make("phi"), pair
    monkeypatch.setattr(correlations, "_HELD_BYTES", held)
    found = task_correlation(a, b, rows(0), rows(1), pooling=pooling, relative_to=base, batch_size=3)
    assert found.relative
    assert found.on_a == pytest.approx(plainly(a, b, rows(0), pooling, base=base), abs=1e-5)
    assert found.on_b == pytest.approx(plainly(a, b, rows(1), pooling, base=base), abs=1e-5)
    edited = {
        name: EditedModel(base, TaskVector.from_finetuned(base, each)) for name, each in zip("ab", pair, strict=True)
    }
    matrix = correlation_matrix(edited, {"a": rows(0), "b": rows(1)}, pooling=pooling, relative_to=base)
    assert matrix["a", "b"] == pytest.approx(found.value, abs=1e-5)
    assert matrix.method.endswith("relative to the base")


def test_what_all_fine_tunes_share_with_their_base_counts_for_nothing_relative_to_it() -> None:
    base = make("phi")
    a, b = (tuned_copy(base, 0.002, seed=seed) for seed in (1, 2))
    literal = task_correlation(a, b, rows(0), rows(1))
    relative = task_correlation(a, b, rows(0), rows(1), relative_to=base)
    assert literal.value > 0.9 and relative.value < 0.5


def test_a_fine_tune_that_is_its_base_has_nothing_to_compare_relative_to_it(pair) -> None:
    base = make("phi")
    with pytest.raises(BadValueError, match="the model that it comes from"):
        task_correlation(base, pair[0], rows(0), rows(1), relative_to=base)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_equation_11_in_every_architecture(architecture: str) -> None:
    base = make(architecture, **({"num_experts_per_tok": 2} if architecture in EXPERTS else {}))
    a, b = tuned_copy(base, 0.1, seed=1), tuned_copy(base, 0.1, seed=2)
    found = task_correlation(a, b, rows(0), rows(1), batch_size=4)
    assert found.on_a == pytest.approx(plainly(a, b, rows(0), "last"), abs=1e-5)


@pytest.mark.parametrize("held", [1, 4 * 20 * 3])
def test_chunks_change_nothing(pair, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """However few outputs are held at a time, in one pass or in two."""
    whole = task_correlation(*pair, rows(0), rows(1), pooling="sample", positions=2)
    monkeypatch.setattr(correlations, "_HELD_BYTES", held)
    monkeypatch.setattr(model_facts, "_LOGITS_BYTES", 1)
    assert task_correlation(*pair, rows(0), rows(1), pooling="sample", positions=2).value == pytest.approx(
        whole.value, abs=1e-6
    )


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("chunks", [1, 3])
def test_what_is_held_does_not_grow_with_the_models(monkeypatch: pytest.MonkeyPatch, count: int, chunks: int) -> None:
    """Outputs as given (4 bytes) and centred (8), of all models together, stay within the budget."""
    base, data = make("phi"), [rows(0, count=6)] * count
    models = {str(seed): tuned_copy(base, 0.1, seed=seed) for seed in range(count)}
    samples = len(data[0]) // chunks
    budget = 12 * 20 * samples * count
    alive: dict[int, int] = {}
    peaks, most_of_one = [0], [0]

    def watched(function, kept):
        def call(*args, **options):
            result = function(*args, **options)
            alive[id(result)] = result.nbytes
            weakref.finalize(result, alive.pop, id(result), None)
            peaks.append(sum(alive.values()))
            most_of_one[0] = max(most_of_one[0], kept(result))
            return result

        return call

    monkeypatch.setattr(correlations, "_HELD_BYTES", budget)
    monkeypatch.setattr(correlations, "pooled_logits", watched(correlations.pooled_logits, len))
    monkeypatch.setattr(correlations, "_normed", watched(correlations._normed, len))
    correlation_matrix(models, dict(zip(models, data, strict=True)))
    assert most_of_one[0] == samples  # so many rows at a time, and no fewer than memory allows
    assert max(peaks) <= budget


@given(st.integers(0, 5), st.sampled_from(["last", "mean"]))
def test_it_is_symmetric_bounded_and_one_for_equal_models(seed: int, pooling: str) -> None:
    base = make("phi")
    a, b = tuned_copy(base, 0.1, seed=seed + 1), tuned_copy(base, 0.1, seed=seed + 20)
    found = task_correlation(a, b, rows(seed), rows(seed + 1), pooling=pooling)
    mirrored = task_correlation(b, a, rows(seed + 1), rows(seed), pooling=pooling)
    assert mirrored.value == pytest.approx(found.value, abs=1e-12)
    assert -1 <= found.value <= 1
    assert task_correlation(a, a, rows(seed), rows(seed + 1), pooling=pooling).value == pytest.approx(1, abs=1e-9)


def test_a_scaled_output_has_the_same_correlation() -> None:
    base = make("llama")  # untied: the head alone is scaled
    a, b = tuned_copy(base, 0.1, seed=1), tuned_copy(base, 0.1, seed=2)
    before = task_correlation(a, b, rows(0), rows(1)).value
    with torch.no_grad():
        a.lm_head.weight.mul_(-3)
    assert task_correlation(a, b, rows(0), rows(1)).value == pytest.approx(-before, abs=1e-6)


def test_vectors_on_one_model_are_as_good_as_models() -> None:
    base = make("phi")
    tuned = [tuned_copy(base, 0.1, seed=seed) for seed in (1, 2)]
    vectors = [TaskVector.from_finetuned(base, each) for each in tuned]
    before = copy.deepcopy(base.state_dict())
    base.train()
    edited = task_correlation(*(EditedModel(base, v) for v in vectors), rows(0), rows(1))
    assert edited.value == pytest.approx(task_correlation(*tuned, rows(0), rows(1)).value, abs=1e-6)
    assert base.training and all(torch.equal(before[k], v) for k, v in base.state_dict().items())


def test_the_matrix_holds_the_pairs() -> None:
    base = make("phi")
    models = {name: tuned_copy(base, 0.1, seed=seed) for seed, name in enumerate("xyz", 1)}
    data = {name: rows(seed) for seed, name in enumerate("xyz")}
    matrix = correlation_matrix(models, data)
    for one, other in [("x", "y"), ("y", "z"), ("z", "x")]:
        expected = task_correlation(models[one], models[other], data[one], data[other]).value
        assert matrix[one, other] == matrix[other, one] == pytest.approx(expected, abs=1e-7)
    assert matrix["x", "x"] == 1
    with pytest.raises(MissingNameError, match="there is no task 'w'"):
        matrix["x", "w"]


def test_the_proxy_is_the_vectors_cosine() -> None:
    base = make("phi")
    vectors = {
        name: TaskVector.from_finetuned(base, tuned_copy(base, 0.1, seed=seed)) for seed, name in enumerate("xyz", 1)
    }
    proxy = correlation_proxy(vectors)
    assert proxy["x", "z"] == proxy["z", "x"] == pytest.approx(vectors["x"].cosine(vectors["z"]), abs=1e-12)
    assert "proxy" in proxy.method and recommend_scales(proxy["x", "z"]).forget.verdict == "works"


def test_sequences_tensors_and_data_sets_give_one_answer() -> None:
    """Sequences, tensors and data sets, padded or not, give one answer."""
    base = make("phi")
    a, b = tuned_copy(base, 0.1, seed=1), tuned_copy(base, 0.1, seed=2)
    data = rows(0)
    expected = task_correlation(a, b, data, data)
    longest = max(map(len, data))
    padded = {
        "input_ids": [row + [0] * (longest - len(row)) for row in data],
        "attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in data],
    }
    for other in (
        Dataset.from_dict({"input_ids": data}),
        Dataset.from_dict(padded),
        [torch.tensor(r) for r in data],
        [numpy.array(r) for r in data],
        BatchEncoding({"input_ids": data}),
        BatchEncoding({k: torch.tensor(v) for k, v in padded.items()}),
    ):
        assert task_correlation(a, b, other, other) == expected
    assert task_correlation(a, b, data, data, max_length=3) == task_correlation(
        a, b, [r[:3] for r in data], [r[:3] for r in data]
    )


def test_outputs_that_differ_by_rounding_alone_are_refused() -> None:
    """The same text may give outputs that differ in their last digit, depending on its place in a batch."""
    output = torch.tensor([[3.0, -2.0, 5.0], [3.0, -2.0, 5.0 + 5e-7]])
    assert output[0, 2] != output[1, 2]
    with pytest.raises(BadValueError, match="the same output for every row"):
        correlations._normed(output, output.double().mean(dim=0))


def test_data_and_models_that_cannot_be_compared_are_refused(pair) -> None:
    a, b = pair
    good = rows(0)
    with pytest.raises(BadValueError, match="data_b is empty"):
        task_correlation(a, b, good, [])
    with pytest.raises(BadValueError, match="row 1 of data_a is empty"):
        task_correlation(a, b, [[3, 4], []], good)
    with pytest.raises(BadValueError, match="two rows or more"):
        task_correlation(a, b, good[:1], good)
    with pytest.raises(BadValueError, match="the same output for every row"):
        task_correlation(a, b, [good[0], good[0]], good)
    for one in ([3, 4, 5], torch.arange(5), BatchEncoding({"input_ids": [3, 4, 5]})):
        with pytest.raises(BadValueError, match="data_a is one sequence of token ids"):
            task_correlation(a, b, one, good)
    with pytest.raises(BadValueError, match="batch_size='8' must be a whole number"):
        task_correlation(a, b, good, good, batch_size="8")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match=r"max_length=2\.5 must be a whole number"):
        task_correlation(a, b, good, good, max_length=2.5)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="by the tasks' names"):
        correlation_matrix([a, b], [good, good])  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="tokenizer="):
        task_correlation(a, b, ["a text"], good)
    with pytest.raises(BadValueError, match="whole numbers"):
        task_correlation(a, b, [[0.5, 1.5]], good)
    with pytest.raises(BadValueError, match="is one text"):
        task_correlation(a, b, "a text", good)
    with pytest.raises(BadValueError, match="no input_ids"):
        task_correlation(a, b, Dataset.from_dict({"text": ["a"]}), good)
    with pytest.raises(BadValueError, match="another tokenizer"):
        task_correlation(a, b, [[99], [3]], good)
    with pytest.raises(BadValueError, match="max_length=32"):
        task_correlation(a, b, [[3] * 33, [4]], good)
    with pytest.raises(BadValueError, match="pooling='first'"):
        task_correlation(a, b, good, good, pooling="first")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="live model"):
        task_correlation("me/model", b, good, good)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="live model"):
        task_correlation(EditedModel("me/model", TaskVector.from_finetuned(a, b)), b, good, good)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="'me/vector' is not a task vector"):
        task_correlation(EditedModel(a, "me/vector"), b, good, good)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="vocabularies of different sizes"):
        task_correlation(a, make("phi", vocab_size=24), good, good)
    with pytest.raises(BadValueError, match="two tasks"):
        correlation_matrix({"x": a}, {"x": good})
    with pytest.raises(BadValueError, match="NaN"):
        broken = shake(copy.deepcopy(a), float("nan"))
        task_correlation(a, broken, good, good)
