"""A row for each edit over seeds: matched by name, counted by seed."""

from __future__ import annotations

import dataclasses

import pytest
from support.made_reports import made_report, made_report_of_edits

from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.evaluation import UnlearningReport, edit_table
from hf_taskvec.evaluation.reporting.plots import forgetting_figure
from hf_taskvec.evaluation.scoring.metrics import PRIMARY

GENTLE, STRONG, REPAIRED = "-0.5*forget", "-1*forget", "repaired | twice"


@pytest.fixture
def reports() -> dict[int, UnlearningReport]:
    """The order by size is another in each seed, and one has an edit that the others lack."""
    return {
        1: made_report_of_edits(1, {GENTLE: 1.0, STRONG: 2.0}, STRONG, relative={GENTLE: 0.5, STRONG: 1.1}),
        2: made_report_of_edits(2, {GENTLE: 1.2, STRONG: 1.0}, STRONG, relative={GENTLE: 0.7, STRONG: 0.9}),
        3: made_report_of_edits(
            3,
            {GENTLE: 1.4, STRONG: 3.0, REPAIRED: 4.0},
            GENTLE,
            chosen=False,
            relative={GENTLE: 0.9, STRONG: None, REPAIRED: 1.6},
        ),
    }


def test_edits_are_matched_by_name_and_not_by_number(reports: dict[int, UnlearningReport]) -> None:
    found = edit_table(reports)
    assert [row.name for row in found.rows] == ["untouched", GENTLE, STRONG, REPAIRED]  # by their mean distance
    gentle, strong, repaired = found.rows[1:]
    assert gentle.distance.value == dataclasses.replace(
        gentle.distance.value, value=pytest.approx(1.2), low=1, high=1.4
    )
    assert {name: (r.value.low, r.value.high, r.seeds) for name, r in gentle.relative.items()} == dict.fromkeys(
        PRIMARY, (0.5, 0.9, 3)
    )
    assert gentle.relative["loss"].value.value == pytest.approx(0.7)
    assert (gentle.qualifies, strong.qualifies, repaired.qualifies) == ((3,), (1, 2), ())
    assert (gentle.chosen, strong.chosen) == ((), (1, 2))  # the nearest is not chosen
    assert strong.relative["loss"].seeds == 2 and repaired.seeds == (3,)
    # of the numbers 2, 1 and 2 in their reports
    assert strong.retained["loss"].value.high == 0.02 and strong.retained["loss"].value.low == 0.01
    assert (strong.membership.value.low, strong.membership.value.high) == pytest.approx((0.1, 0.2))


def test_the_table_shows_names_ranges_and_counts(reports: dict[int, UnlearningReport]) -> None:
    text = edit_table(reports).to_markdown()
    lines = text.splitlines()
    assert lines[0].startswith("| edit | distance | R, rouge_l |") and lines[0].endswith(
        "qualifies | passes | chosen |"
    )
    assert lines[3].startswith(r"| -0.5\*forget | 1.200 [1.000, 1.400] | 0.70 [0.50, 0.90] |")
    assert lines[4].startswith(r"| -1\*forget | 2.000 [1.000, 3.000] | 1.00 [0.90, 1.10] (2 seeds) |")
    assert lines[4].endswith("| 1.7 [1.0, 2.0] % | 2 of 3 | – | 2 of 3 |")
    assert lines[5].endswith("| 0 of 1 | – | 0 of 1 |") and r"repaired \| twice" in lines[5]
    assert "mean over 3 seeds" in text and "no passages to judge by" in text and "λ" not in text


def test_reports_of_lambda_have_a_row_for_each(reports: dict[int, UnlearningReport]) -> None:
    plain = {}
    for seed in (1, 2):
        report = made_report(seed)
        made = [dataclasses.replace(each, scale=0.0 - each.scale / 5) for each in reports[1].choice.candidates]
        plain[seed] = dataclasses.replace(report, choice=dataclasses.replace(report.choice, candidates=tuple(made)))
    found = edit_table(plain)
    assert [(row.name, row.distance, row.chosen) for row in found.rows] == [
        ("0", None, ()),
        ("−0.2", None, ()),
        ("−0.4", None, (1, 2)),
    ]
    assert found.to_markdown().startswith("| λ | R, rouge_l |")


def test_what_cannot_share_a_table_is_refused(reports: dict[int, UnlearningReport]) -> None:
    with pytest.raises(BadValueError, match="no reports"):
        edit_table({})
    with pytest.raises(BadValueError, match=r"seed 4 has nothing to compare: made up\. Leave it out"):
        edit_table({4: made_report(4)})
    with pytest.raises(MismatchError, match="seed 1 is of named edits, that of seed 4 of λ"):
        edit_table({**reports, 4: made_report(4)})
    with pytest.raises(MismatchError, match="are of one model"):
        edit_table({**reports, 4: reports[1]})


def test_an_edit_that_is_far_out_leaves_the_plot_room_for_the_others() -> None:
    def axis(strong: float) -> tuple[float, list[str]]:
        edits, relative = {GENTLE: 1.0, STRONG: 2.0}, {GENTLE: 0.5, STRONG: strong}
        left = forgetting_figure(made_report_of_edits(1, edits, GENTLE, relative=relative)).axes[0]
        return left.get_xlim()[1], [text.get_text().strip() for text in left.texts]

    assert axis(13.7) == (2.5, ["13.7 →"] * len(PRIMARY))
    most, told = axis(1.1)
    assert 1.1 < most < 1.3 and told == []
