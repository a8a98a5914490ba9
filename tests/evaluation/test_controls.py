"""The controls of an edit: on tiny models, and against columns whose answer is known."""

import copy
import json

import numpy as np
import pytest
import torch
from support import launch
from support.tiny_books import train

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, CorruptFileError, MissingNameError
from hf_taskvec.evaluation import ControlTable, protocols, run_controls, sweep
from hf_taskvec.evaluation.reporting.control_table import control_table
from hf_taskvec.evaluation.scoring.metrics import METRICS
from hf_taskvec.evaluation.scoring.relative_forgetting import difference_of_losses
from hf_taskvec.evaluation.scoring.specificity import ChangeColumns
from hf_taskvec.evaluation.scoring.statistics import Draws

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=12)
FAST = {"resamples": 200}
DRAWS = Draws(resamples=400)
OWN, OTHER = "the vector of lamps", "the vector of boats"
NOISE, LOGITS = "noise of its norms (seed 0)", "noise on the logits"


@pytest.fixture(scope="module")
def vectors(made):
    tokenizer, books, base, _, single = made
    boats = train(copy.deepcopy(base), tokenizer, books[1:], 100)
    return TaskVector.from_finetuned(base, single, name="lamps"), TaskVector.from_finetuned(base, boats, name="boats")


@pytest.fixture(scope="module")
def table(made, vectors):
    tokenizer, books, base, joint, _ = made
    lamps, boats = vectors
    options = {"others": {"boats": boats}, "reference": base, "tokenizer": tokenizer}
    return run_controls(joint, lamps, -1.0, books, SHORT, **options, **FAST)


def test_it_has_a_row_for_each_change_and_a_number_for_each_book_and_metric(table, made, vectors):
    kinds = {row.name: row.kind for row in table.rows}
    assert kinds == {
        "untouched": "untouched",
        OWN: "vector",
        OTHER: "other_vector",
        NOISE: "noise",
        LOGITS: "output_noise",
        "reference": "reference",
    }
    assert all(len(row.scores) == 2 * 4 for row in table.rows)
    sizes = {row.name: row.size for row in table.rows}
    assert sizes[OWN] == pytest.approx(vectors[0].norm()) and sizes[NOISE] == pytest.approx(sizes[OWN], rel=1e-6)
    assert sizes[OTHER] == pytest.approx(vectors[1].norm()) and sizes[LOGITS] > 0
    assert [(book.name, book.role) for book in table.books] == [("lamps", "forget"), ("boats", "retain")]
    for metric in ("rouge_l", "loss", "extraction_strength", "exact_memorisation"):
        for book in ("lamps", "boats"):
            untouched = table.score("untouched", book, metric)
            assert untouched.lost is None or untouched.lost.value == 0
        gone = table.score("reference", "lamps", metric).relative
        assert gone is None or gone.value == pytest.approx(1.0)
        assert table.score(OWN, "boats", metric).relative is None  # the reference says nothing of other books


def test_the_vectors_own_numbers_are_those_of_a_sweep_and_nothing_is_asked_twice(table, made, vectors, tmp_path):
    tokenizer, books, base, joint, _ = made
    before = {name: parameter.clone() for name, parameter in joint.named_parameters()}
    options = {"reference": base, "tokenizer": tokenizer, "store": tmp_path, **FAST}
    report = sweep(joint, vectors[0], [-1.0], books, SHORT, permutations=100, **options)
    kept = len(list(tmp_path.glob("*.json")))
    found = run_controls(joint, vectors[0], -1.0, books, SHORT, others={"boats": vectors[1]}, **options)
    assert all(torch.equal(parameter, before[name]) for name, parameter in joint.named_parameters())
    assert "forward" not in vars(joint)
    for book in ("lamps", "boats"):
        for metric in ("rouge_l", "loss"):
            assert found.score(OWN, book, metric).value == report.score(book, -1.0, metric).value
            assert found.score("untouched", book, metric).value == report.score(book, 0.0, metric).value
        assert found.score(OWN, book).lost.value == pytest.approx(-report.score(book, -1.0).relative.value)
    added = len(list(tmp_path.glob("*.json"))) - kept
    seen = sum(book.passages for book in found.books)
    assert 0 < added <= 3 * (-(-seen // 16) + 1)  # three controls, in batches of 16
    again = run_controls(joint, vectors[0], -1.0, books, SHORT, others={"boats": vectors[1]}, **options)
    assert again == found and len(list(tmp_path.glob("*.json"))) == kept + added
    for one, other in zip(found.rows, table.rows, strict=True):  # whose batches were others
        for a, b in zip(one.scores, other.scores, strict=True):
            assert a.value.value == pytest.approx(b.value.value, rel=1e-3)


def test_the_right_vector_takes_more_of_its_book_than_noise_does(table):
    for metric in ("rouge_l", "loss"):
        assert table.score(OWN, "lamps", metric).lost.low > table.score(NOISE, "lamps", metric).lost.high
    by_noise = [each for each in table.comparisons if each.question == "control" and each.other_change == NOISE]
    assert {each.metric for each in by_noise if each.difference.low > 0} >= {"rouge_l", "loss"}
    mirrored = [each for each in table.comparisons if each.question == "mirrored" and each.metric == "loss"]
    assert [(each.change, each.book, each.other_change) for each in mirrored] == [(OTHER, "boats", OWN)]
    assert mirrored[0].difference.value > 0
    swapped = {
        (each.book, each.other_book, each.change, each.other_change)
        for each in table.comparisons
        if each.question == "swapped"
    }
    assert swapped == {("lamps", "boats", OWN, OWN)}


def test_a_random_vector_in_the_place_of_the_right_one_is_not_specific(made, vectors):
    tokenizer, books, _, joint, _ = made
    random = vectors[0].noise(seed=77)
    found = run_controls(joint, random, -1.0, books, SHORT, others={"boats": vectors[1]}, tokenizer=tokenizer, **FAST)
    assert not found.is_specific and found.answers["control"] in ("not_specific", "not_shown")
    assert found.sentence.startswith(("Not specific: it is not so that", "Specificity is not shown: "))


def test_low_rank_vectors_are_attached_and_their_noise_as_well(made, vectors):
    tokenizer, books, _, joint, _ = made
    matrices = vectors[0].filter(include="*.mlp.*").compress(rank=2)
    few = protocols.get(SHORT, samples=3)
    tables = [
        run_controls(joint, matrices, -1.0, books[0], few, tokenizer=tokenizer, merge=merge, **FAST)
        for merge in (True, False)
    ]
    for one, other in zip(*(each.rows for each in tables), strict=True):
        assert (one.name, one.kind) == (other.name, other.kind)
        assert one.fingerprint == other.fingerprint or one.kind == "output_noise"  # its size is measured
        for a, b in zip(one.scores, other.scores, strict=True):
            assert a.value.value == pytest.approx(b.value.value, rel=1e-2, abs=1e-2)
    assert set(tables[0].answers) == {"control"}


def test_it_reads_back_and_refuses_what_is_damaged(table):
    content = json.loads(json.dumps(table.to_dict()))
    assert ControlTable.from_dict(content) == table
    content["rows"][0]["kind"] = "magic"
    with pytest.raises(CorruptFileError, match="the table of controls is damaged: rows/0/kind"):
        ControlTable.from_dict(content)


def test_the_table_shows_every_change_on_every_book(table):
    text = table.to_markdown()
    _, note, grid = text.split("\n\n")
    assert "λ = −1" in note and "95%" in note
    rows = grid.splitlines()
    assert len(rows) == 2 + 6 and all(row.count("|") == 4 for row in rows)
    assert rows[0].startswith("| change | lamps (forget; ") and "boats (retain; " in rows[0]
    assert "R = 1.00" in rows[-1] and "‖λτ‖ = " in rows[3] and "standard deviation" in rows[6]
    lost = table.score(OWN, "lamps").lost
    assert f"Rouge-L: {100 * lost.value:.0f} %" in rows[3]


def test_what_cannot_be_controlled_is_refused_before_any_work(made, vectors):
    tokenizer, books, _, joint, _ = made
    lamps, boats = vectors
    for arguments, message in (
        ({"scale": 0.0}, "finite λ that is not 0"),
        ({"scale": float("nan")}, "finite λ that is not 0"),
        ({"books": books[1:]}, "no book is to be forgotten"),
        ({"books": [*books, books[1]]}, "two books are called 'boats'"),
        ({"noise_seeds": ()}, "at least one seed"),
        ({"noise_seeds": (1, 1)}, "none twice"),
    ):
        given = {"scale": -1.0, "books": books, "noise_seeds": (0,), **arguments}
        with pytest.raises(BadValueError, match=message):
            run_controls(joint, lamps, given["scale"], given["books"], SHORT, noise_seeds=given["noise_seeds"])
    for name in ("boat", "lamps"):
        with pytest.raises(MissingNameError, match="no book that is to be kept"):
            run_controls(joint, lamps, -1.0, books, SHORT, others={name: boats}, tokenizer=tokenizer)
    with pytest.raises(MissingNameError, match="no 'rouge_l' of 'lamps' under 'the vector of lamp'"):
        ControlTable(-1.0, 0.95, (), (), (), (), {}, "").score("the vector of lamp", "lamps")


def test_one_process_and_two_give_the_same_table(tmp_path):
    script = launch.SUPPORT / "launched_controls.py"
    for processes in (1, 2):
        launch.succeed(script, tmp_path / f"{processes}.json", tmp_path / f"store-{processes}", processes=processes)
    one, two = (json.loads((tmp_path / f"{processes}.json").read_text()) for processes in (1, 2))
    assert one == two
    assert one["rows"][4]["kind"] == "output_noise" and one["rows"][4]["scores"] != one["rows"][0]["scores"]


# The judgement alone, on columns that are made up.


def made_up(levels: dict[str, dict[str, float]], n: int = 40, spread: float = 0.05, **kinds: str):
    """Changes whose books score around these levels, with the passages' own difficulty in common."""
    draw = np.random.default_rng(0)
    hard = {book: spread * draw.standard_normal(n) for book in next(iter(levels.values()))}
    found = []
    for name, books in levels.items():
        values = {b: {"rouge_l": level + hard[b] + 0.01 * draw.standard_normal(n)} for b, level in books.items()}
        kind = kinds.get(name, name)
        of = "oz" if kind == "other_vector" else None
        found.append((ChangeColumns(name, kind, values, of), name, -1.0, 1.0))
    return found


ROUGE = [METRICS["rouge_l"].info]
GOOD = {
    "untouched": {"alice": 0.8, "oz": 0.8},
    "vector": {"alice": 0.2, "oz": 0.75},
    "other_vector": {"alice": 0.75, "oz": 0.25},
    "noise": {"alice": 0.78, "oz": 0.78},
    "output_noise": {"alice": 0.5, "oz": 0.5},
}
ROLES = {"alice": "forget", "oz": "retain"}


def judged(levels, roles=ROLES, **options):
    return control_table(made_up(levels, **options), roles, ROUGE, DRAWS)


def test_a_specific_vector_is_called_so_with_the_narrowest_margin():
    found = judged(GOOD)
    assert found.is_specific and found.answers == dict.fromkeys(("control", "swapped", "mirrored"), "specific")
    assert found.sentence.startswith("Specific: the vector takes more of alice than every control does")
    nearest = min(each.difference.value for each in found.comparisons if each.question == "control")
    assert nearest == pytest.approx(0.3 / 0.8, abs=0.02)
    assert f"{100 * nearest:.1f} [" in found.sentence and "vector against output_noise" in found.sentence


@pytest.mark.parametrize(
    ("change", "book", "level", "question"),
    [
        ("output_noise", "alice", 0.1, "control"),  # noise takes as much
        ("other_vector", "alice", 0.15, "control"),  # so does another vector
        ("vector", "oz", 0.1, "swapped"),  # the vector destroys everything
        ("vector", "oz", 0.2, "mirrored"),  # and takes more of the other book than its own vector
    ],
)
def test_each_question_can_be_answered_by_no(change, book, level, question):
    levels = {name: dict(books) for name, books in GOOD.items()}
    levels[change][book] = level
    found = judged(levels)
    assert found.answers[question] == "not_specific" and not found.is_specific
    assert found.sentence.startswith("Not specific: ") and "it is not so that" in found.sentence


def test_what_is_not_sure_is_not_shown():
    levels = {**GOOD, "output_noise": {"alice": 0.205, "oz": 0.5}}
    found = judged(levels, n=8)
    control = next(e for e in found.comparisons if e.question == "control" and e.other_change == "output_noise")
    assert control.difference.low < 0 < control.difference.value
    assert found.answers["control"] == "not_shown" and not found.is_specific
    assert "it is not sure that the vector takes more of alice" in found.sentence


def test_the_vector_of_an_aligned_book_may_take_as_much():
    levels = {name: dict(books) for name, books in GOOD.items()}
    levels["other_vector"]["alice"] = levels["vector"]["oz"] = 0.1
    found = judged(levels, roles={"alice": "forget", "oz": "aligned"})
    assert found.answers == {"control": "specific"} and found.is_specific
    assert not any(each.counts for each in found.comparisons if "other_vector" in (each.change, each.other_change))


def test_a_book_that_the_model_hardly_knew_tells_nothing():
    levels = {**GOOD, "reference": {"alice": 0.8, "oz": 0.8}}
    found = judged(levels)
    assert found.answers["control"] == "cannot_tell" and not found.is_specific
    assert found.score("vector", "alice").relative is None
    known = judged({**GOOD, "reference": {"alice": 0.2, "oz": 0.8}})
    assert known.is_specific
    assert known.score("vector", "alice").relative.value == pytest.approx(1.0, abs=0.02)


def test_the_difference_of_losses_is_paired_and_a_difference_of_shares():
    draw = np.random.default_rng(1)
    before, one, two = 0.5 + 0.4 * draw.random(50), np.full(50, 0.1), np.full(50, 0.3)
    metric = METRICS["rouge_l"]
    found = difference_of_losses((before, one), (before, two), metric, DRAWS, paired=True)
    assert found.value == pytest.approx((two.mean() - one.mean()) / before.mean())
    apart = difference_of_losses((before, one), (before, two), metric, DRAWS, paired=False)
    assert apart.value == found.value and apart.high - apart.low > found.high - found.low
    losses = (np.full(9, 1.0), np.full(9, 1.0) + np.log(4)), (np.full(9, 2.0), np.full(9, 2.0) + np.log(2))
    grown = difference_of_losses(*losses, METRICS["loss"], DRAWS, paired=True)
    assert grown.value == pytest.approx(0.75 - 0.5)
    nothing = np.zeros(5)
    assert difference_of_losses((nothing, nothing), (nothing, nothing), metric, DRAWS, paired=True) is None


def test_a_metric_of_which_nothing_takes_anything_does_not_count():
    changes = made_up(GOOD)
    for change, *_ in changes:
        for book in change.values.values():
            book["extraction_strength"] = np.full(40, 1 / 8)  # the least that there is
    found = control_table(changes, ROLES, [*ROUGE, METRICS["extraction_strength"].info], DRAWS)
    assert {each.metric for each in found.comparisons if each.counts} == {"rouge_l"} and found.is_specific
    assert {each.metric for each in found.comparisons} == {"rouge_l", "extraction_strength"}


def test_hostile_names_stay_in_their_cells():
    roles = {"a|b\n<script>": "forget", "oz": "retain"}
    levels = {name: {"a|b\n<script>": books["alice"], "oz": books["oz"]} for name, books in GOOD.items()}
    text = judged(levels, roles=roles).to_markdown()
    assert text.count("<script>") == text.count("\\<script>") and len(text.split("\n\n")[2].splitlines()) == 2 + len(
        GOOD
    )
