"""Several seeds together: each counts once, two methods on one seed are a pair, and few seeds promise little."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.made_reports import made_report, made_report_of_edits

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.evaluation import Criteria, UnlearningReport, compare_methods, compare_seeds, protocols
from hf_taskvec.evaluation.scoring.metrics import PRIMARY
from hf_taskvec.evaluation.scoring.scale_choice import Choice

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "seeds_unlearn.py"
ROUGE = [0.9, 1.0, 1.1, 0.95, 1.05]


def five(**more: float) -> dict[int, UnlearningReport]:
    """Five seeds that pass, and whose forgotten book loses most."""
    return {
        20 + i: made_report(20 + i, relative={**dict.fromkeys(PRIMARY, 1.0), "rouge_l": r}, **more)
        for i, r in enumerate(ROUGE)
    }


def changed(report: UnlearningReport, **choice: object) -> UnlearningReport:
    assert isinstance(report.choice, Choice)
    return dataclasses.replace(report, choice=dataclasses.replace(report.choice, **choice))


def test_every_seed_counts_once() -> None:
    found = compare_seeds(five())
    assert [row.seed for row in found.rows] == [20, 21, 22, 23, 24] and found.passed == 5
    assert found.outcomes == {"as_if_never_seen": 5, "still_known": 0, "over_forgotten": 0, "cannot_tell": 0}
    mean = found.relative["rouge_l"]
    assert mean.value == pytest.approx(np.mean(ROUGE)) and mean.seeds == 5
    reach = 2.776445 * np.std(ROUGE, ddof=1) / np.sqrt(5)
    assert mean.interval is not None and mean.interval.high - mean.value == pytest.approx(reach)
    assert found.retained["loss"].value == pytest.approx(0.03) and found.membership.value == 0
    # However many passages and however small their p-values: five seeds that agree are 1/32, and four tests 1/8.
    assert [test.p_values for test in found.tests] == [{"sign test": 1 / 32, "sign-flip test": 1 / 32}] * 2
    assert [test.adjusted for test in found.tests] == [{"sign test": 1 / 8, "sign-flip test": 1 / 8}] * 2
    assert [test.difference.value for test in found.tests] == pytest.approx([0.25, 0.15])
    assert [test.larger for test in found.tests] == [5, 5]


def test_outcomes_are_counted_apart_and_the_nearest_scale_is_no_pass() -> None:
    reports = {
        0: made_report(0),
        1: made_report(1, relative=0.3),
        2: made_report(2, relative=1.6),
        3: made_report(3, relative={**dict.fromkeys(PRIMARY, 1.0), "extraction_strength": None}),
        4: made_report(4, scale=None, nearest=-0.6),
        5: made_report(5, retained=0.3),
        6: changed(made_report(6, scale=None), verdict=None, tests=()),
    }
    found = compare_seeds(reports)
    assert found.outcomes == {"as_if_never_seen": 3, "still_known": 1, "over_forgotten": 1, "cannot_tell": 2}
    assert [row.seed for row in found.rows if row.passed] == [0] and found.passed == 1
    assert [(row.scale, row.chosen) for row in found.rows[3:5]] == [(-0.4, True), (-0.6, False)]
    assert found.relative["extraction_strength"].seeds == 5 and found.relative["loss"].seeds == 6
    assert found.rows[6].scale is None and found.rows[6].relative == {}
    assert found.tests[0].first.keys() == {0, 1, 2, 3, 4, 5}
    text = found.to_markdown()
    assert "1 of 7 seeds passes (the verdicts: 3 as if never seen, 1 still known, 1 forgotten beyond never seen" in text
    assert "| −0.6 (nearest) |" in text and "(5 seeds)" in text and "| 6 | – | – |" in text


def test_a_seed_against_the_others_moves_both_tests() -> None:
    reports = five()
    reports[24] = made_report(24, lost=(0.3, 0.2, 0.4))
    forget, aligned = compare_seeds(reports).tests
    assert forget.larger == 4 and forget.p_values["sign test"] == 6 / 32
    # −0.1 beside four times +0.25: as large a sum has only the pattern without a minus, and the observed one.
    assert forget.p_values["sign-flip test"] == 2 / 32
    # −0.2 beside four times +0.15: a minus at any one of the others instead gives no less.
    assert aligned.p_values == {"sign test": 6 / 32, "sign-flip test": 6 / 32}
    assert forget.adjusted == {"sign test": 3 * 6 / 32, "sign-flip test": 4 * 2 / 32}
    assert aligned.adjusted == {"sign test": 3 * 6 / 32, "sign-flip test": 3 * 6 / 32}


def test_the_note_says_what_so_few_seeds_can_show() -> None:
    text = compare_seeds(five()).to_markdown()
    assert "With 5 seeds the smallest p-value there can be is 1/32 = 0.0312, and 0.125 after the correction" in text
    assert "it would take 7 seeds that all agree to go below 0.05 there" in text
    assert "Holm's correction over the 4 tests" in text and "exact and one-sided" in text
    assert "| 25.0 % |" not in text and "+25.0 %" in text and "0.031 (0.125)" in text
    seven = compare_seeds({seed: made_report(seed) for seed in range(7)})
    assert "it would take" not in seven.to_markdown()
    assert max(p for test in seven.tests for p in test.adjusted.values()) == 4 / 128


def test_one_seed_is_shown_and_promises_nothing() -> None:
    found = compare_seeds({3: made_report(3)})
    assert found.relative["rouge_l"].interval is None
    assert [test.adjusted["sign test"] for test in found.tests] == [1.0, 1.0]
    assert "1 of 1 seed passes" in found.to_markdown()


def test_the_book_that_is_farthest_off_stands_for_several() -> None:
    report = made_report(0)
    verdict = report.choice.verdict
    other = [dataclasses.replace(m, book="hare", relative=None) for m in verdict.metrics]
    other[0] = dataclasses.replace(other[0], relative=dataclasses.replace(verdict.metrics[0].relative, value=0.5))
    member = dataclasses.replace(verdict.membership[0], book="hare")
    member = dataclasses.replace(member, difference=dataclasses.replace(member.difference, value=-0.3))
    losses = (*verdict.retained, *(dataclasses.replace(loss, book="tin") for loss in verdict.retained))
    losses = (*losses[:-1], dataclasses.replace(losses[-1], lost=dataclasses.replace(losses[-1].lost, value=0.2)))
    verdict = dataclasses.replace(
        verdict, metrics=(*verdict.metrics, *other), membership=(*verdict.membership, member), retained=losses
    )
    (row,) = compare_seeds({0: changed(report, verdict=verdict)}).rows
    assert row.relative["rouge_l"].value == 0.5 and row.relative["loss"].value == 1.0
    assert row.membership == -0.3 and row.worst_retained == 0.2
    assert row.retained == {**dict.fromkeys(PRIMARY, 0.03), losses[-1].metric: 0.2}


def test_methods_are_compared_in_pairs() -> None:
    full, lora = five(), five(retained=0.05)
    lora = {seed: changed(report, scale=-0.2 - seed / 100) for seed, report in lora.items()}
    lora[20] = changed(lora[20], scale=-0.6)
    found = compare_methods(full, lora, names=("full", "LoRA"))
    by = {test.what: test for test in found.tests}
    assert len(by) == 6
    rouge = by["how far R is from 1, rouge_l"]
    assert rouge.first == pytest.approx({20: 0.1, 21: 0.0, 22: 0.1, 23: 0.05, 24: 0.05})
    assert rouge.p_values == {"sign test": 1.0} and rouge.difference.value == 0
    retained = by["what the worst retained book lost"]
    assert retained.difference.value == pytest.approx(-0.02) and retained.larger == 0
    assert retained.p_values == {"sign test": 2 / 32} and retained.adjusted == {"sign test": 6 * 2 / 32}
    scale = by["size of λ"]
    assert scale.second == pytest.approx({20: 0.6, 21: 0.41, 22: 0.42, 23: 0.43, 24: 0.44})
    text = found.to_markdown()
    assert "full: 5 of 5 seeds pass" in text and "LoRA: 5 of 5 seeds pass" in text
    assert "| compared | full | LoRA | difference | full is larger in | p, sign test |" in text
    assert "the smallest p-value there can be is 1/16 = 0.0625, and 0.375 after the correction" in text
    assert "| what the worst retained book lost | 3.0 % | 5.0 % | −2.0" in text


def test_a_swapped_comparison_is_the_same_with_other_signs() -> None:
    full, lora = five(), five(retained=0.06)
    one, other = compare_methods(full, lora), compare_methods(lora, full)
    for test, swapped in zip(one.tests, other.tests, strict=True):
        assert test.p_values == swapped.p_values and test.adjusted == swapped.adjusted
        assert test.difference.value == -swapped.difference.value


def test_what_is_no_pair_or_not_alike_is_refused() -> None:
    reports = five()
    with pytest.raises(BadValueError, match="no reports"):
        compare_seeds({})
    with pytest.raises(BadValueError, match="seed 20 has no book to forget"):
        compare_seeds({20: dataclasses.replace(reports[20], choice=None)})
    with pytest.raises(MismatchError, match="seeds 20 and 25 are of one model, so they are one experiment"):
        compare_seeds({**reports, 25: reports[20]})
    with pytest.raises(MismatchError, match=r"seed 21 by Criteria.*judge all alike, by report\.rechoose"):
        compare_seeds({20: reports[20], 21: made_report(21, criteria=Criteria(retain_bound=0.3))})
    other = dataclasses.replace(reports[21], protocol=protocols.get(samples=7))
    with pytest.raises(MismatchError, match="seed 20 was measured under protocol"):
        compare_seeds({20: reports[20], 21: other})
    with pytest.raises(MismatchError, match="the seeds 23, 24 are only of one method"):
        compare_methods(reports, {seed: reports[seed] for seed in (20, 21, 22)})
    with pytest.raises(MismatchError, match="two reports of seed 20 are of different books"):
        compare_methods({20: reports[20]}, {20: reports[21]})
    with pytest.raises(MismatchError, match="full was judged by"):
        strict = {20: made_report(20, criteria=Criteria(retain_bound=0.3))}
        compare_methods({20: reports[20]}, strict, names=("full", "LoRA"))


GENTLE, STRONG = "-0.5*forget", "-0.9*forget + 0.5*keep"


def by_name(strong: float = 3.0) -> dict[int, UnlearningReport]:
    """Two seeds that judge the same edit, which is the second by size in one and the first in the other."""
    return {
        20: made_report_of_edits(20, {GENTLE: 2.0, STRONG: strong}, STRONG),
        21: made_report_of_edits(21, {GENTLE: 2.0, STRONG: 1.5}, STRONG, chosen=False),
    }


def test_edits_are_known_by_their_names_and_have_no_mean_number() -> None:
    found = compare_seeds(by_name())
    assert [(row.scale, row.edit, row.distance) for row in found.rows] == [(2.0, STRONG, 3.0), (1.0, STRONG, 1.5)]
    lines = [[cell.strip() for cell in line.split("|")[1:4]] for line in found.to_markdown().splitlines()]
    name = r"-0.9\*forget + 0.5\*keep"
    assert lines[0][:2] == ["seed", "edit"] and lines[4][:2] == ["mean over seeds", "–"]
    assert [line[:2] for line in lines[2:4]] == [["20", name], ["21", f"{name} (nearest)"]]
    assert "λ" not in found.to_markdown()


def test_a_seed_of_edits_and_one_of_lambda_are_no_experiment() -> None:
    with pytest.raises(MismatchError, match="seed 20 is of named edits, that of seed 22 of λ: they are two"):
        compare_seeds({**by_name(), 22: made_report(22)})


def test_methods_of_edits_are_compared_by_how_far_they_move_the_weights() -> None:
    found = compare_methods(by_name(), by_name(strong=4.0), names=("one", "other"))
    moved = next(test for test in found.tests if test.what == "how far the edit moves the weights")
    assert (moved.first, moved.second) == ({20: 3.0, 21: 1.5}, {20: 4.0, 21: 1.5})
    assert not any("λ" in test.what for test in found.tests) and len(found.tests) == 6


def test_a_method_of_edits_beside_one_of_lambda_leaves_the_sizes_out_and_says_so() -> None:
    plain = {seed: made_report(seed) for seed in (20, 21)}
    found = compare_methods(by_name(), plain, names=("edits", "λ alone"))
    assert [test.what for test in found.tests] == [
        *(f"how far R is from 1, {name}" for name in PRIMARY),
        "what the worst retained book lost",
    ]
    assert "the sizes of the edits are not compared" in found.to_markdown()
    assert "not compared" not in compare_methods(plain, plain).to_markdown()


def test_names_from_a_strange_report_cannot_break_the_table() -> None:
    name = "a|b\n# head"
    report = made_report(0, relative={name: 1.0}, retained={name: 0.1}, criteria=Criteria(metrics=(name,)))
    report = dataclasses.replace(report, metrics=(dataclasses.replace(report.metrics[0], name=name),))
    text = compare_seeds({0: report}).to_markdown() + compare_methods({0: report}, {0: report}).to_markdown()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert "\n# head" not in text and len({line.replace("\\|", "").count("|") for line in table[:4]}) == 1


def test_the_benchmark_shows_the_runs_that_are_finished(tmp_path: Path) -> None:
    for seed in (20, 21):
        made_report(seed).save(tmp_path / f"full-seed-{seed}", plots=False)
    made_report(20, scale=None, nearest=-0.6).save(tmp_path / "lora-seed-20", plots=False)
    made_report(20, relative=0.3).save(tmp_path / "rank-4", plots=False)

    def shown(*flags: str) -> str:
        command = [sys.executable, str(BENCHMARK), "--only-table", "--output", str(tmp_path), *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    text = shown()
    assert "| full, seed 21 | −0.4 | 0.800 → 0.200 (0.200) | 1.00 [0.95, 1.05] |" in text
    assert "| 0.52 (0.52), +0 | 3 %, 3 %, 3 %, 3 % | as if never seen | kept |" in text
    assert "2 of 2 seeds pass" in text and "0 of 1 seed pass" in text
    assert "### full and lora in pairs" in text and "With 1 seed the smallest p-value" in text
    vectors = shown("--corollaries")
    assert "forget, at λ = −0.4" in vectors and "| rank 4 | 0.800 → 0.400 |" in vectors and "still known |" in vectors
    assert shown("--seeds", "99").strip() == "No run is finished."
