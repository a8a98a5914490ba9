"""Sweeps over whole edits: each on its own beside the others, by name, the gentlest first."""

import copy
from dataclasses import replace

import pytest
import torch

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, CorruptFileError, MismatchError, MissingNameError
from hf_taskvec.evaluation import (
    Criteria,
    UnlearningReport,
    compare_reports,
    edit_grid,
    edit_line,
    edit_simplex,
    edit_table,
    protocols,
    sweep,
)
from hf_taskvec.evaluation.reporting.rechoosing import verdicts_by_scale

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=12)
FAST = {"resamples": 200, "permutations": 200}


@pytest.fixture(scope="module")
def case(made):
    tokenizer, books, base, joint, single = made
    forget = TaskVector.from_finetuned(base, single, name="forget")
    whole = TaskVector.from_finetuned(base, joint, name="joint")
    return tokenizer, books, copy.deepcopy(joint), {"forget": forget, "joint": whole}, base


@pytest.fixture(scope="module")
def edits(case):
    return {"strong": -1.0 * case[3]["forget"], "gentle": -0.5 * case[3]["forget"]}


@pytest.fixture(scope="module")
def report(case, edits, tmp_path_factory):
    tokenizer, books, model, _, base = case
    before = copy.deepcopy(model.state_dict())
    where = tmp_path_factory.mktemp("edits") / "report"
    found = sweep(model, edits, None, books, SHORT, tokenizer=tokenizer, output=where, reference=base, **FAST)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return found, where


def test_edits_have_the_scores_of_the_same_edits_by_lambda(case, report):
    tokenizer, books, model, vectors, _ = case
    found, _ = report
    by_scale = sweep(model, vectors["forget"], [-0.5, -1], books, SHORT, tokenizer=tokenizer, **FAST)
    assert [edit.name for edit in found.edits] == ["gentle", "strong"] and found.scales == (0, 1, 2)
    for name, scale in (("untouched", 0.0), ("gentle", -0.5), ("strong", -1.0)):
        for metric in ("rouge_l", "loss", "exact_memorisation"):
            one, other = found.score("lamps", name, metric), by_scale.score("lamps", scale, metric)
            assert one.value == other.value and one.difference == other.difference
    assert found.edits[1].distance == pytest.approx(2 * found.edits[0].distance)
    assert found.edits[0].distance == pytest.approx(0.5 * vectors["forget"].norm())


def test_a_report_of_edits_speaks_of_their_names(report):
    found, where = report
    text = found.to_markdown()
    assert (
        "| gentle |" in text and "| strong |" in text and "| untouched |" in text and "λ" not in text.split("## Def")[0]
    )
    assert "`-0.5*forget`" in text
    chosen = {0.0: "untouched", 1.0: "gentle", 2.0: "strong"}
    assert found.choice.judged in chosen and chosen[found.choice.judged] in found.choice.reason
    assert (where / "scores.png").exists() and (where / "pareto.svg").exists()
    assert "strong" in found._repr_html_()


def test_a_report_of_edits_is_read_back_and_chosen_anew(report):
    found, where = report
    again = UnlearningReport.load(where)
    assert again == found
    other = again.rechoose(Criteria(metrics=("rouge_l", "loss")))
    assert "λ" not in other.choice.reason and "edit" in other.choice.reason
    assert other.edits == found.edits and set(other.figures()) >= {"scores", "forgetting", "pareto", "samples"}
    content = found.to_dict() | {"edits": []}
    assert UnlearningReport.from_dict(content).names.noun == "λ"
    with pytest.raises(CorruptFileError, match="1 edits"):
        UnlearningReport.from_dict(found.to_dict() | {"edits": found.to_dict()["edits"][:1]})
    for name in ("strong", "untouched"):
        twice = found.to_dict()
        twice["edits"][0]["name"] = name
        with pytest.raises(CorruptFileError, match="have one name"):
            UnlearningReport.from_dict(twice)


def test_an_edit_is_asked_once_whatever_list_it_is_in(case, edits, report):
    tokenizer, books, model, _, _ = case
    found, where = report
    store = {"store": where / "store", **FAST}
    again = sweep(model, [edits["gentle"]], None, books, SHORT, tokenizer=tokenizer, **store)
    assert again.timing.generated == 0 and [edit.name for edit in again.edits] == ["-0.5*forget"]
    assert again.score("lamps", "-0.5*forget").value == found.score("lamps", "gentle").value


def test_every_edit_gets_the_verdict_that_it_has_as_the_judged_one(case, edits, report):
    tokenizer, books, model, _, base = case
    found, where = report
    verdicts = verdicts_by_scale(found)
    assert set(verdicts) == {0.0, 1.0, 2.0} and verdicts[found.choice.judged] == found.choice.verdict
    other = next(number for number in (1.0, 2.0) if number != found.choice.judged)
    name = found.names.short(other)
    options = {"tokenizer": tokenizer, "reference": base, "store": where / "store", **FAST}
    alone = sweep(model, {name: edits[name]}, None, books, SHORT, **options)
    assert alone.choice.judged == 1.0 and verdicts[other] == alone.choice.verdict
    assert verdicts[other] != found.choice.verdict
    assert verdicts_by_scale(replace(found, passages=())) == {}


def test_a_table_over_seeds_has_the_reports_own_numbers(report):
    lenient = Criteria(metrics=("loss",), low=0.01, high=100, membership=1, retain_bound=1)
    found = report[0].rechoose(lenient)
    table = edit_table({0: found, 1: replace(found, model="another")})
    assert [row.name for row in table.rows] == ["untouched", "gentle", "strong"]
    verdicts = verdicts_by_scale(found)
    for row, candidate in zip(table.rows, found.choice.candidates, strict=True):
        assert {metric: each.value.value for metric, each in row.relative.items()} == candidate.relative
        assert row.membership.value.low == row.membership.value.high == candidate.membership
        assert row.qualifies == ((0, 1) if candidate.qualifies else ())
        assert row.passes == ((0, 1) if verdicts[candidate.scale].passed else ())
    assert [row.passes for row in table.rows] == [(), (0, 1), (0, 1)]  # so both kinds are there
    assert "no passages" not in table.to_markdown()


def test_the_distance_of_an_edit_is_found_by_its_number(report):
    found, _ = report
    assert [found.distance(number) for number in found.scales] == [0.0, *(edit.distance for edit in found.edits)]
    with pytest.raises(BadValueError, match="no edit of number 3: it has 2"):
        found.distance(3.0)
    with pytest.raises(BadValueError, match="it has 0 named edits"):
        replace(found, edits=()).distance(1.0)


def test_reports_of_edits_and_of_lambda_share_a_table(case, report):
    tokenizer, books, model, vectors, _ = case
    plain = sweep(model, vectors["forget"], [-0.5], books, SHORT, tokenizer=tokenizer, **FAST)
    text = compare_reports({"by name": report[0], "by λ": plain})
    assert "| gentle |" in text and "| λ = −0.5 |" in text


def test_families_are_combinations():
    one, two = (TaskVector.from_tensors({"w": torch.eye(2) * k}, name=n) for k, n in ((1.0, "a"), (2.0, "b")))
    grid = edit_grid({"a": one, "b": two}, {"a": [0, -1], "b": [0, 0.25]})
    assert list(grid) == ["0.25*b", "-1*a", "-1*a + 0.25*b"]  # nothing is no edit
    assert torch.equal(grid["-1*a + 0.25*b"].dense("w"), -0.5 * torch.eye(2))
    assert len(edit_grid({"a": one}, {"a": [0.12345678, 0.12345679]})) == 2  # close, and yet two
    line = edit_line({"a": one, "b": two}, {"a": -1}, {"b": 1}, points=3)
    assert torch.equal(line["-0.5*a + 0.5*b"].dense("w"), 0.5 * torch.eye(2)) and len(line) == 3
    shares = edit_simplex({"a": one, "b": two}, steps=2)
    assert list(shares) == ["1*b", "0.5*a + 0.5*b", "1*a"]


def test_senseless_families_are_refused():
    vectors = {"a": TaskVector.from_tensors({"w": torch.ones(2)})}
    with pytest.raises(BadValueError, match="give each vector its own"):
        edit_grid(vectors, {"b": [1]})
    with pytest.raises(BadValueError, match="nan"):
        edit_grid(vectors, {"a": [float("nan")]})
    with pytest.raises(BadValueError, match="no vector 'b'"):
        edit_line(vectors, {}, {"b": 1})
    with pytest.raises(BadValueError, match="two ends"):
        edit_line(vectors, {}, {"a": 1}, points=1)
    with pytest.raises(BadValueError, match="at least one"):
        edit_simplex({}, steps=2)


def test_senseless_lists_are_refused_before_any_work(case, edits):
    tokenizer, books, model, _, _ = case

    def swept(change, scales=None):
        return sweep(model, change, scales, books, SHORT, tokenizer=tokenizer, **FAST)

    with pytest.raises(BadValueError, match="no edit to compare"):
        swept({})
    with pytest.raises(BadValueError, match="scales=None"):
        swept(edits, [0, -1])
    with pytest.raises(BadValueError, match="scales=None is for several"):
        swept(edits["strong"])
    with pytest.raises(BadValueError, match="not as a str"):
        swept({"a": "vector"})
    with pytest.raises(BadValueError, match="two edits are called"):
        swept([edits["strong"], edits["strong"]])
    with pytest.raises(BadValueError, match="cannot be the name"):
        swept({" ": edits["strong"]})
    with pytest.raises(BadValueError, match="'untouched' is what the report calls"):
        swept({"untouched": edits["strong"]})
    with pytest.raises(MismatchError, match="the edit 'other'"):
        swept({"other": TaskVector.from_tensors({"no.such.weight": torch.ones(3)})})


def test_no_vector_is_read_before_all_edits_fit(case, edits, monkeypatch):
    tokenizer, books, model, _, _ = case
    read = []
    norm = TaskVector.norm
    monkeypatch.setattr(TaskVector, "norm", lambda vector: (read.append(vector.expression), norm(vector))[1])
    other = TaskVector.from_tensors({"no.such.weight": torch.ones(3)})
    with pytest.raises(MismatchError, match="the edit 'other'"):
        sweep(model, {**edits, "other": other}, None, books, SHORT, tokenizer=tokenizer, **FAST)
    assert read == []


def test_an_unknown_edit_is_named(report):
    with pytest.raises(MissingNameError, match="gentle"):
        report[0].score("lamps", "gentel")
