"""`taskvec choose`: λ chosen anew from a stored report."""

from pathlib import Path
from typing import Annotated

import typer

from hf_taskvec.cli.arguments import DebugOption, JsonOption
from hf_taskvec.cli.criteria_options import (
    CertainOption,
    HighOption,
    JudgingRuleOption,
    LowOption,
    MarginOption,
    MembershipOption,
    MetricOption,
    RetainBoundOption,
    chosen_criteria,
)
from hf_taskvec.cli.report_answer import show_report


def choose_command(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A sweep's folder, or its report.json.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write the new report there.")
    ] = None,
    metric: MetricOption = None,
    low: LowOption = None,
    high: HighOption = None,
    membership: MembershipOption = None,
    retain_bound: RetainBoundOption = None,
    certain: CertainOption = False,
    rule: JudgingRuleOption = None,
    margin: MarginOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Choose λ anew from a report's passages; no model is run.

    taskvec choose report --retain-bound 0.3 -o gentler

    What is not given is the default, whatever the sweep was told. REPORT is not changed;
    one of the version before is judged by today's criteria.
    """
    criteria = chosen_criteria(
        metric,
        low=low,
        high=high,
        membership=membership,
        retain_bound=retain_bound,
        certain=certain,
        rule=rule,
        margin=margin,
    )
    from hf_taskvec.atomic import ensure_writable
    from hf_taskvec.errors import OutputError
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

    chosen = UnlearningReport.load(report).rechoose(criteria)
    if output is not None:
        if output.resolve() == (report if report.is_dir() else report.parent).resolve():
            raise OutputError(f"{output.name} holds the report that is read. Name another --output.")
        ensure_writable(output)
        chosen.save(output)
    show_report(chosen, output, json)
