"""`combine`: what holds for every rule, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.example_vectors import OPTIONS, some_adapters, some_vectors, suited, trimmed
from support.tiny_models import DTYPES, TinyModels, added, make, tensors, tuned_copy

from hf_taskvec import TaskVector, combine, rules
from hf_taskvec.algebra.computed_deltas import Computed
from hf_taskvec.algebra.deltas import LowRank
from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError, UnsupportedError

# Every rule.


@pytest.mark.parametrize("rule", sorted(rules()))
def test_negative_weights_negate(rule: str) -> None:
    """All weights with the other sign give the other sign, exactly; a weight of 0 leaves a vector out."""
    vectors = some_vectors(2)
    options = OPTIONS.get(rule, {})

    def by_rule(weights: list[float]) -> TaskVector:
        taken, given = suited(rule, vectors, weights)
        return combine(taken, rule, given, **options)

    for weights in ([1.0, 0.5], [1.0, -0.5]):
        merged, negated = by_rule(weights), by_rule([-w for w in weights])
        assert merged.norm() > 0
        for name in merged:
            assert torch.equal(negated.dense(name), -merged.dense(name)), name
    assert by_rule([1.0, 0.0]).cosine(vectors[0]) > 0.1
    assert by_rule([-1.0, 0.0]).cosine(vectors[0]) < -0.1


@pytest.mark.parametrize("rule", sorted(rules()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merged_vector_is_the_same_streamed_live_and_saved(
    rule: str, dtype: torch.dtype, models: TinyModels, tmp_path: Path
) -> None:
    base = make("phi", dtype)
    base.save_pretrained(tmp_path / "base")
    vectors = []
    for seed in (1, 2):
        tuned_copy(base, seed=seed).save_pretrained(tmp_path / f"tuned{seed}")
        vectors.append(TaskVector.from_finetuned(tmp_path / "base", tmp_path / f"tuned{seed}"))
    taken, weights = suited(rule, vectors, [1.0, -0.5])
    merged = combine(taken, rule, weights, **OPTIONS.get(rule, {}))
    merged.apply(tmp_path / "base", tmp_path / "out", scale=0.7, threads=2)
    merged.save(tmp_path / "vector")
    loaded = TaskVector.load(tmp_path / "vector")
    streamed = tensors(tmp_path / "out")
    with merged.applied_to(base, 0.7):
        live = {name: value.clone() for name, value in base.state_dict().items()}
    for name, source in tensors(tmp_path / "base").items():
        again = added(loaded, name, source, 0.7)
        assert torch.equal(streamed[name].read(), again), name
        assert torch.equal(streamed[name].read(), live[name]), name
    assert loaded.provenance == merged.provenance


def test_the_rule_and_its_paper_are_in_the_provenance(tmp_path: Path) -> None:
    a, b = some_vectors(2)
    merged = 0.5 * combine([a, -b], "ties", [1.0, 2.0], density=0.5)
    assert merged.expression == "0.5*combine([v0, -v1], 'ties', weights=[1.0, 2.0], density=0.5)"
    merged.save(tmp_path / "merged")
    document = json.loads((tmp_path / "merged" / "taskvec.json").read_text())
    assert document["provenance"]["rules"] == {"ties": "https://arxiv.org/abs/2306.01708"}
    assert (merged + a).named("c").compress(rank=1).provenance.rules == merged.provenance.rules


def test_the_card_shows_the_rule_its_paper_and_code_that_merges_again(models: TinyModels, tmp_path: Path) -> None:
    from hf_taskvec.publishing.model_card import card_for
    from hf_taskvec.publishing.notation import evaluate_expression
    from hf_taskvec.publishing.written_folder import open_artifact

    pair = models.pair("phi")
    vectors = {name: pair.vector(name=name) for name in ("a", "b")}
    merged = combine([vectors["a"], vectors["b"].filter(include="*.weight")], "ties", [1.0, -0.5], density=0.5)
    merged.apply(pair.base, tmp_path / "model")
    card = card_for(open_artifact(tmp_path / "model"))
    assert "The rule `ties` merged vectors: see [its paper](https://arxiv.org/abs/2306.01708)." in card
    assert "from hf_taskvec import combine\n" in card
    code = "vector = combine([a, b.filter(include=['*.weight'])], 'ties', weights=[1.0, -0.5], density=0.5)"
    assert code in card
    # The notation is what the command line takes.
    again = evaluate_expression(merged.expression, vectors)
    name = "model.layers.0.mlp.fc1.weight"
    assert again.expression == merged.expression and torch.equal(again.dense(name), merged.dense(name))
    with pytest.raises(MissingNameError, match="Did you mean 'ties'"):
        evaluate_expression("combine([a, b], 'tise')", vectors)
    with pytest.raises(BadValueError, match="takes a plain value"):
        evaluate_expression("combine([a, b], 'ties', density=a)", vectors)
    with pytest.raises(BadValueError, match="no place in an expression"):
        evaluate_expression("combine(a, b)", vectors)


@pytest.mark.parametrize("rule", sorted(rules()))
@pytest.mark.parametrize("weights", [None, [0.5, 1.75], [1.0, -0.5], [1.0, 0.0]])
def test_the_expression_merges_again(rule: str, weights: list[float] | None) -> None:
    """To the last bit, also where two vectors had one name."""
    from hf_taskvec.publishing.notation import evaluate_expression

    taken, weights = suited(rule, some_vectors(2), weights)
    options = OPTIONS.get(rule, {}) | ({"normalize": "weight"} if rule == "ties" else {})
    merged = combine([vector.named("v") for vector in taken], rule, weights, **options)
    names = ["v", "v_2", "v_3"][: len(taken)]
    again = evaluate_expression(
        merged.expression, {name: vector.named(name) for name, vector in zip(names, taken, strict=True)}
    )
    assert set(again) == set(merged) and again.expression == merged.expression
    for name in merged:
        one, other = (vector.dense(name, "float64") for vector in (merged, again))
        assert torch.equal(one, other), name


def test_papers_of_linear_rules_reach_the_provenance() -> None:
    a, b = some_vectors(2)
    assert combine([a, b]).provenance.rules == (("sum", "https://arxiv.org/abs/2212.04089"),)
    both = combine([combine([a, b], "ties"), b], "mean").provenance
    assert [name for name, _ in both.rules] == ["ties", "mean"] and both.expression.startswith("0.5*combine(")


def test_a_sum_of_many_is_what_adding_them_one_by_one_gives() -> None:
    """The same terms, labels and sources, also where labels are the same and vectors cancel; in linear time."""
    draw = torch.Generator().manual_seed(0)
    vectors = [
        TaskVector.from_tensors({f"w{n % 3}": torch.randn(2, generator=draw), "w": torch.randn(2)}, name=f"v{n % 5}")
        for n in range(40)
    ]
    many = [*vectors, -vectors[3], vectors[3], *vectors[:7], 0.5 * vectors[2] - vectors[1]]
    found, expected = combine(many), sum(many[1:], many[0])
    assert found == expected and list(found) == list(expected)
    assert found.expression == expected.expression and found.provenance.origins == expected.provenance.origins
    assert all(torch.equal(found.dense(name), expected.dense(name)) for name in expected)
    count, larger = (
        [TaskVector.from_tensors({"w": torch.ones(1)}, name=f"v{n}") for n in range(number)] for number in (250, 2000)
    )
    seconds = []
    for some in (count, larger):
        start = time.process_time()
        combine(some)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 32 * seconds[0]  # eight times as many; one by one takes 64 times as long


def test_vectors_of_one_label_get_another_in_the_expression() -> None:
    a, b = some_vectors(2)
    merged = combine([a.named("v"), b.named("v")], "ties")
    assert merged.expression == "combine([v, v_2], 'ties')"


def test_merged_vectors_are_compared_and_fingerprinted_by_what_they_do() -> None:
    a, b = some_vectors(2)
    merged = combine([a, b], "ties", density=0.5)
    assert merged == combine([a, b], "ties", density=0.5)
    assert merged.fingerprint == combine([a, b], "ties", density=0.5).fingerprint
    others = [
        combine([a, b], "ties", density=0.4),
        combine([a, b], "ties", [1.0, 2.0], density=0.5),
        combine([a, 2 * b], "ties", density=0.5),
        combine([a, b], "magnitude", density=0.5),
        combine([a, b], "tsv"),
        combine([a, b], "tsv", rank=2),
    ]
    assert len({each.fingerprint for each in (merged, *others)}) == 7
    assert len({merged, *others}) == 7
    assert len(merged - combine([a, b], "ties", density=0.5)) == 0


def test_merged_vectors_take_part_in_the_algebra() -> None:
    a, b, c = some_vectors()
    merged = combine([a, b], "ties", density=0.5)
    name = "model.layers.0.mlp.fc1.weight"
    expected = merged.dense(name, "float64") - 0.5 * c.dense(name, "float64")
    assert torch.allclose((merged - 0.5 * c).dense(name, "float64"), expected)
    small = (merged - 0.5 * c).compress(rank=5)
    assert small.rank(name) == 5 and 0 < small.discarded[name] < 1
    again = combine([merged, c], "magnitude", density=0.5)
    kept = trimmed(merged.dense(name, "float64"), 0.5) + trimmed(c.dense(name, "float64"), 0.5)
    assert torch.allclose(again.dense(name, "float64"), kept)
    assert merged.cosine(a) > 0.1 and merged.nbytes == a.nbytes + b.nbytes


def test_a_merge_of_adapters_is_exported_as_an_adapter(tmp_path: Path) -> None:
    merged = combine(some_adapters(), "tsv", rank=2)
    merged.to_adapter(tmp_path / "adapter")
    again = TaskVector.from_adapter(tmp_path / "adapter")
    assert all(isinstance(term.delta, LowRank) for name in again for term in again[name].terms)
    for name in merged:
        assert torch.allclose(again.dense(name), merged.dense(name), atol=1e-6)


def test_nothing_is_read_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = some_vectors()
    taken = {rule: suited(rule, vectors)[0] for rule in rules()}

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch:
        patch.setattr("hf_taskvec.algebra.sources.InMemory.read", refuse)
        # Which rows `rows` keeps, what `without` subtracts and the angles between vectors must be known at once, as
        # their docstrings tell.
        reading = ("rows", "without", "slerp", "model_stock")
        merged = {
            rule: combine(taken[rule], rule, **OPTIONS.get(rule, {}))
            for rule in rules()
            if rule not in (*reading, "interpolate")
        }
        for rule in reading:
            with pytest.raises(AssertionError, match="a tensor was read"):
                combine(vectors[:2], rule)
    kinds = {rule: type(vector["model.layers.0.mlp.fc1.weight"].terms[0].delta) for rule, vector in merged.items()}
    computed = {rule for rule, kind in kinds.items() if issubclass(kind, Computed)}
    sparse = {"breadcrumbs", "breadcrumbs_ties", "dare", "dare_ties", "della", "della_ties", "magnitude", "ties"}
    assert computed == sparse | {"importance", "mergekit", "negmerge", "sce"}
    assert {rule for rule, kind in kinds.items() if kind is LowRank} == {"low_rank", "tsv"}


def test_rows_of_a_merged_vector_are_those_of_its_dense_value() -> None:
    """The result of another rule, pruned: the kept rows in memory, in fp64."""
    a, b = some_vectors(2)
    ties = combine([a, b], "ties", density=0.5)
    name = "model.layers.0.mlp.fc1.weight"
    dense = ties.dense(name, "float64")
    kept = dense.norm(dim=1).topk(10).indices
    expected = torch.zeros_like(dense)
    expected[kept] = dense[kept]
    assert torch.equal(combine([ties], "rows", fraction=0.25).dense(name, "float64"), expected)


def test_computed_factors_do_not_outlive_their_vector() -> None:
    """Neither they nor what they were computed from."""
    vectors = some_adapters()
    merged = combine(vectors, "tsv", rank=2)
    merged.norm()
    sources: Any = [source for vector in vectors for source in vector.sources]
    alive = [weakref.ref(source.tensor) for source in sources]
    del sources
    factor = weakref.ref(merged.sources[0].read())
    assert all(each() is not None for each in (*alive, factor))
    del vectors, merged
    gc.collect()
    assert not any(each() is not None for each in (*alive, factor))


def test_the_last_computed_factors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as `_KEPT` bytes hold."""
    made = []
    monkeypatch.setattr("hf_taskvec.merging.spectral_rules._orthonormal", lambda each: (made.append(1), each)[1])
    first, second = combine(some_adapters(), "tsv", rank=2), combine(some_adapters(), "tsv", rank=1)
    name = "model.layers.0.mlp.fc1.weight"
    for vector in (first, first, second, first):
        vector.dense(name)
    assert len(made) == 2 * 2  # left and right, of each
    monkeypatch.setattr("hf_taskvec.algebra.computed_deltas._KEPT", 1)
    for vector in (second, second, first, second):
        vector.dense(name)
    assert len(made) == 2 * 2 + 2 * 2


def test_vectors_may_change_different_parameters() -> None:
    a = TaskVector.from_tensors({"x": torch.ones(3), "y": torch.ones(3)}, name="a")
    b = TaskVector.from_tensors({"y": 3 * torch.ones(3), "z": torch.ones(3)}, name="b")
    merged = combine([a, b], "ties", density=1.0)
    assert {name: merged.dense(name)[0].item() for name in merged} == {"x": 1.0, "y": 2.0, "z": 1.0}


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Four models of 100 MB by TIES: the peak of anonymous memory does not follow their size.

    glibc gives freed memory back at once here: otherwise it keeps tens of megabytes, more or fewer by chance.
    """
    base = make(
        "llama",
        torch.bfloat16,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        vocab_size=8000,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    base.save_pretrained(tmp_path / "base")
    for number in range(4):
        tuned_copy(base, seed=number).save_pretrained(tmp_path / f"tuned{number}")
    size = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors")) / 2**20
    script = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from hf_taskvec import TaskVector, combine\n"
        "import hf_taskvec.application.to_checkpoint\n"
        "def anonymous():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "folder = Path(sys.argv[1])\n"
        "vectors = [TaskVector.from_finetuned(folder / 'base', folder / f'tuned{n}') for n in range(4)]\n"
        "before, peak, done = anonymous(), [0], []\n"
        "def watch():\n"
        "    while not done:\n"
        "        peak[0] = max(peak[0], anonymous()); time.sleep(0.002)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "combine(vectors, 'ties', density=0.2).apply(folder / 'base', folder / 'out', threads=1)\n"
        "done.append(1); thread.join()\n"
        "print((peak[0] - before) / 1024)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert size > 90
    assert float(result.stdout.splitlines()[-1]) < 30


# Bad input.


def test_bad_input_is_refused_by_name(models: TinyModels) -> None:
    a, b, c = some_vectors()
    with pytest.raises(MissingNameError, match=r"no merging rule 'tise'. Did you mean 'ties'\?"):
        combine([a, b], "tise")
    with pytest.raises(BadValueError, match=r"rule=\[0.5, 0.5\] must be the name.*Weights are given as weights="):
        combine([a, b], [0.5, 0.5])  # type: ignore[arg-type]
    for wrong in ("x", float("nan"), True):
        with pytest.raises(BadValueError, match=f"outside={wrong!r} must be a finite number"):
            combine([a, b], "layers", schedule=[1.0], outside=wrong)
    with pytest.raises(BadValueError, match="rescale='no' must be True or False"):
        combine([a, b], "dare", rescale="no")
    with pytest.raises(BadValueError, match="seed='x' must be a whole number"):
        combine([a, b], "dare", seed="x")
    with pytest.raises(BadValueError, match="at least 2 vectors, and there is 1"):
        combine([a], "ties")
    with pytest.raises(BadValueError, match="at least 1 vector, and there are 0"):
        combine([], "dare")
    with pytest.raises(BadValueError, match="takes a list of task vectors, not a TaskVector"):
        combine(a)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="not a str"):
        combine([a, "b"])  # type: ignore[list-item]
    with pytest.raises(BadValueError, match="3 vectors and 2 weights"):
        combine([a, b, c], weights=[1.0, 1.0])
    for weights in (0.5, "abc", {1.0, 2.0, 3.0}):
        with pytest.raises(BadValueError, match="must be a list of numbers, one for each vector"):
            combine([a, b, c], weights=weights)  # type: ignore[arg-type]
    as_tensor: Any = torch.tensor([1.0, -0.5])
    assert combine([a, b], weights=as_tensor) == combine([a, b], weights=[1.0, -0.5])
    with pytest.raises(BadValueError, match="weight of nan"):
        combine([a, b], weights=[1.0, float("nan")])
    with pytest.raises(MissingNameError, match=r"'ties' has no option 'densty'. Did you mean 'density'\?"):
        combine([a, b], "ties", densty=0.5)
    with pytest.raises(MissingNameError, match="It takes no options"):
        combine([a, b], "sum", density=0.5)
    with pytest.raises(BadValueError, match="needs schedule="):
        combine([a, b], "layers")
    with pytest.raises(BadValueError, match="2 schedules for 3 vectors"):
        combine([a, b, c], "layers", schedule=[[1.0], [1.0]])
    with pytest.raises(BadValueError, match="list of numbers"):
        combine([a, b, c], "layers", schedule="up")
    for density in (0.0, 1.5, -0.2, float("nan"), "0.5", True):
        for rule in ("ties", "dare", "magnitude", "breadcrumbs"):
            with pytest.raises(BadValueError, match="above 0 and at most 1"):
                combine([a, b], rule, density=density)
    with pytest.raises(BadValueError, match="density has 3 numbers for 2 vectors"):
        combine([a, b], "ties", density=[0.1, 0.2, 0.3])
    with pytest.raises(MissingNameError, match=r"no normalize='counts'. Did you mean 'count'\?"):
        combine([a, b], "ties", normalize="counts")
    with pytest.raises(BadValueError, match=r"gamma=1\.0"):
        combine([a, b], "breadcrumbs", gamma=1.0)
    with pytest.raises(BadValueError, match="between two vectors, not 3"):
        combine([a, b, c], "interpolate")
    with pytest.raises(BadValueError, match="rank=0"):
        combine([a, b], "tsv", rank=0)
    with pytest.raises(BadValueError, match="not 0"):
        combine([a, b], "weighted", [0.0, 0.0])


def test_vectors_that_do_not_belong_together_are_refused(models: TinyModels) -> None:
    phi = models.pair("phi").vector()
    with pytest.raises(MismatchError, match=r"different architectures \(PhiForCausalLM, LlamaForCausalLM\)"):
        combine([phi, models.pair("llama").vector()])
    with pytest.raises(MismatchError, match=r"shapes \[20\] and \[24\].*vocabulary sizes differ"):
        combine([phi, models.pair("phi", vocab_size=24).vector()])
    with pytest.raises(MismatchError, match="none of the parameters"):
        combine([TaskVector.from_tensors({"x": torch.ones(2)}), TaskVector.from_tensors({"y": torch.ones(2)})])


def test_vectors_of_different_tokenizers_are_refused(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    vectors = {}
    for name, tokens in {"a": ["x", "y"], "b": ["y", "x"], "c": ["x", "y"]}.items():
        shutil.copytree(pair.tuned, tmp_path / name)
        tokenizer = {"model": {"vocab": {t: n for n, t in enumerate(tokens)}}, "padding": name}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        vectors[name] = TaskVector.from_finetuned(pair.base, tmp_path / name)
    combine([vectors["a"], vectors["c"], pair.vector()])
    with pytest.raises(MismatchError, match="a and b come from models of different tokenizers"):
        combine([vectors["a"], vectors["b"]])
    # SentencePiece's own file tells nothing of a list of tokens, but of another such file.
    for name in ("d", "e"):
        shutil.copytree(pair.tuned, tmp_path / name)
        (tmp_path / name / "tokenizer.model").write_bytes(name.encode())
        vectors[name] = TaskVector.from_finetuned(pair.base, tmp_path / name)
    combine([vectors["a"], vectors["d"]])
    with pytest.raises(MismatchError, match="d and e come from models of different tokenizers"):
        combine([vectors["a"], vectors["d"], vectors["e"]])


def test_what_is_not_finite_is_refused_by_name() -> None:
    good = TaskVector.from_tensors({"w": torch.ones(4, 4)}, name="good")
    for value in (float("nan"), float("inf")):
        bad = TaskVector.from_tensors({"w": torch.full((4, 4), value)}, name="bad")
        for rule in sorted(rules()):
            if rule == "rows":
                continue  # of MLPs alone
            with pytest.raises(BadValueError, match="w: the weights contain NaN"):
                combine(suited(rule, [good, bad])[0], rule, **OPTIONS.get(rule, {})).dense("w")


def test_a_computed_vector_cannot_be_a_reference(models: TinyModels, tmp_path: Path) -> None:
    v = models.pair("phi").vector()
    with pytest.raises(UnsupportedError, match="computed by a merging rule"):
        combine([v, v.named("again")], "ties").save(tmp_path / "v", reference=True)
