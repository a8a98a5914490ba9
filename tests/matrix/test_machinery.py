"""The matrix can fail: each check finds a fault that is planted, and each change of an outcome is told."""

import json

import pytest
from matrix import check_lora_config, lora_cases, results
from matrix.checks import outcome
from matrix.outcomes import CRASHED, EXACT, NOT_BUILT, PARTLY, REFUSED, WRONG, Outcome, Tally, judge, normalised

from hf_taskvec import TaskVector
from hf_taskvec.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")


def _changed(monkeypatch, owner, name, change):
    """Let a method give something slightly else."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: change(original(*args, **options)))


@pytest.fixture(params=["a wrong λ", "a lost parameter"])
def fault(request):
    if request.param == "a wrong λ":
        return lambda vector: 1.01 * vector
    lost = "layers.1.mlp.down_proj.weight", "layer.1.output.dense.bias"
    return lambda vector: vector.filter(exclude=[name for name in vector if name.endswith(lost)])


@pytest.mark.parametrize("check", ["streamed", "live", "vocabulary"])
def test_a_fault_in_extraction_is_found(check, fault, monkeypatch, tmp_path):
    if check == "live":  # one of the two ways that are compared
        from hf_taskvec.extraction import from_finetuned

        original = from_finetuned.from_finetuned
        wrong = lambda base, tuned, **options: (  # noqa: E731
            original(base, tuned, **options) if hasattr(base, "joinpath") else fault(original(base, tuned, **options))
        )
        monkeypatch.setattr(from_finetuned, "from_finetuned", wrong)
    else:
        _changed(monkeypatch, TaskVector, "from_finetuned", fault)
    assert outcome("llama", check, tmp_path).kind == WRONG


def test_a_fault_in_reading_adapters_is_found(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        _changed(patch, TaskVector, "from_adapter", lambda vector: 1.001 * vector)
        assert outcome("llama", "lora", tmp_path / "a").kind == WRONG
    _changed(monkeypatch, TaskVector, "from_adapter", lambda vector: vector.filter(exclude=["*.bias"]))
    case = lora_cases.FIELDS["lora_bias"]["true"]
    assert judge(lambda tally: check_lora_config.check(case, tmp_path / "b", tally)).kind == WRONG


@pytest.mark.parametrize("row", ["llama", "BertForSequenceClassification"])
def test_a_fault_in_attached_edits_is_found(row, fault, monkeypatch, tmp_path):
    original = TaskVector.applied_to

    def applied_to(self, model, scale, merge=True):
        return original(self if merge else fault(self), model, scale, merge=merge)

    monkeypatch.setattr(TaskVector, "applied_to", applied_to)
    assert outcome(row, "attached", tmp_path).kind == WRONG


def test_a_fault_in_exports_is_found(monkeypatch, tmp_path):
    original = TaskVector.to_adapter
    monkeypatch.setattr(
        TaskVector, "to_adapter", lambda self, *args, **options: original(1.001 * self, *args, **options)
    )
    assert outcome("llama", "export", tmp_path).kind == WRONG


def test_a_crash_is_told_from_a_refusal_and_a_type_that_is_not_built_from_both(monkeypatch, tmp_path):
    def crash(*args, **options):
        raise RuntimeError("broken")

    def refuse(*args, **options):
        raise UnsupportedError("llama is refused. Use another.")

    monkeypatch.setattr(TaskVector, "from_finetuned", crash)
    found = outcome("llama", "streamed", tmp_path / "a")
    assert (found.kind, found.reasons) == (CRASHED, ("RuntimeError: broken",))
    monkeypatch.setattr(TaskVector, "from_finetuned", refuse)
    assert outcome("llama", "streamed", tmp_path / "b").kind == REFUSED
    monkeypatch.setattr("matrix.subjects.build", crash)
    assert outcome("llama", "streamed", tmp_path / "c").kind == NOT_BUILT


def test_a_refusal_that_names_nothing_is_wrong():
    def check(tally: Tally) -> None:
        for name in ("a.weight", "b.weight"):
            with tally.part(name, names=[name]):
                raise UnsupportedError("a.weight is refused.")
        tally.exact += 1

    assert judge(check).kind == WRONG


def test_some_refused_beside_exact_ones_is_exact_in_part():
    def check(tally: Tally) -> None:
        with tally.part("a", names=["a.weight"]):
            raise UnsupportedError("a.weight: cannot be done in 3 ways.")
        tally.exact += 1

    assert judge(check) == Outcome(
        PARTLY,
        ("a: …: cannot be done in N ways.",),
        "a: a.weight: cannot be done in 3 ways.",
        "1 exact, 0 unseen, 1 refused",
    )


def test_each_change_of_an_outcome_is_told():
    key = "llama", "live"
    for before, now in ((EXACT, REFUSED), (EXACT, WRONG), (REFUSED, EXACT)):
        told = results.differences({key: Outcome(now)}, {key: Outcome(before)}, [key], reasons=False)
        assert len(told) == 1 and f"{before} is committed, {now} was found" in told[0]
    other = {key: Outcome(REFUSED, ("b",))}, {key: Outcome(REFUSED, ("a",))}
    assert results.differences(*other, [key], reasons=True) and not results.differences(*other, [key], reasons=False)
    assert results.differences({key: Outcome(EXACT)}, {}, [key], reasons=False)


def test_a_killed_run_goes_on_where_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "run_folder", lambda: tmp_path)
    outcome = Outcome(REFUSED, ("…: no",), "a.b: no", "0 exact")
    results.keep("llama", "live", outcome)
    with next(tmp_path.glob("*.jsonl")).open("a") as file:
        file.write('{"row": "llama", "check": "lo')  # the kill
    assert results.kept() == {("llama", "live"): outcome}
    written = json.loads(results.as_expected(results.kept()))
    assert written["outcomes"]["llama"]["live"][0] == REFUSED and list(written["reasons"].values()) == ["…: no"]


def test_reasons_do_not_depend_on_the_model():
    first = "model.layers.0.q.weight, lm_head.weight and 3 more: LlamaForCausalLM holds 4."
    assert normalised(first) == normalised("h.1.c.weight: GPT2LMHeadModel holds 12.") == "…: … holds N."
