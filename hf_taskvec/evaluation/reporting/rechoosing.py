"""A report's λ chosen anew by other criteria, or every λ judged as the chosen one: the model is not asked again."""

from dataclasses import replace

from hf_taskvec.errors import BadValueError, CorruptFileError
from hf_taskvec.evaluation.reporting.passage_halves import choose_scale, judge_scales
from hf_taskvec.evaluation.reporting.summary import PassageValues, all_loss_tests
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import METRICS
from hf_taskvec.evaluation.scoring.statistics import Draws
from hf_taskvec.evaluation.scoring.verdict import Verdict


def rechosen(report: UnlearningReport, criteria: Criteria) -> UnlearningReport:
    """What `UnlearningReport.rechoose` gives: see there."""
    if not report.passages:
        raise BadValueError("this report has no passages, as those on the Hub: λ is chosen anew from a whole one")
    if report.choice is None:
        raise BadValueError("no book of the report is one to forget, so there is no λ to choose")
    criteria.check([*METRICS.values(), *report.metrics], {info.name for info in report.metrics})
    values, draws = _measured(report)
    choice = choose_scale(
        values,
        report.books,
        criteria,
        draws,
        split_followed=report.choice.never_seen.source == "split",
        score_factor=report.protocol.score_factor,
        names=report.names,
    )
    tests = all_loss_tests(values, report.books, report.metric(criteria.headline), draws)
    return replace(report, choice=choice, tests=tests)


def verdicts_by_scale(report: UnlearningReport) -> dict[float, Verdict]:
    """The verdict on every λ of a report, by its own criteria and as `choice.verdict` is: on the half that judges.

    Args:
        report (`UnlearningReport`):
            With a book to forget.

    Returns:
        `dict[float, Verdict]`: By λ, or by the numbers of edits; empty if the report has no passages.

    Raises:
        `CorruptFileError`: If a passage lacks a value.
    """
    if not report.passages or report.choice is None:
        return {}
    values, draws = _measured(report)
    return judge_scales(values, report.books, report.choice.criteria, draws, score_factor=report.protocol.score_factor)


def _measured(report: UnlearningReport) -> tuple[PassageValues, Draws]:
    """What the report's numbers were made from, and how they were drawn."""
    _check_passages(report)
    drawn = report.settings
    draws = Draws(drawn.resamples, drawn.level, drawn.permutations, drawn.seed)
    references = [info.name for info in report.references]
    return PassageValues(report.passages, report.scales, report.metrics, references), draws


def _check_passages(report: UnlearningReport) -> None:
    """Refuse passages that lack a λ, a reference model or a value: a file may hold anything."""
    names = [info.name for info in report.references]
    for passage in report.passages:
        if [each.scale for each in passage.at] != list(report.scales) or report.scales[:1] != (0,):
            raise CorruptFileError(f"passage {passage.id[:60]!r} was not asked at each λ of the report")
        if [each.reference for each in passage.references] != names:
            raise CorruptFileError(f"passage {passage.id[:60]!r} was not asked of each reference of the report")
        answers = [(f"at λ={each.scale:g}", each.values) for each in passage.at]
        answers += [(f"of {each.reference}", each.values) for each in passage.references]
        for where, values in answers:
            missing = [info.name for info in report.metrics if info.name not in values]
            if missing:
                raise CorruptFileError(f"passage {passage.id[:60]!r} has no {missing[0]!r} {where}")
