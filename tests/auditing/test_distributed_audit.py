"""One process or two: the same audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support import launch

from hf_taskvec.auditing import AuditReport

SCRIPT = launch.SUPPORT / "launched_audit.py"
ATTACKS = {"relearn-forget", "relearn-forget-lora", "sample", "prompt-longer_prefix"}


def test_two_processes_say_what_one_says(tmp_path: Path) -> None:
    for count in (1, 2):
        launch.succeed(SCRIPT, tmp_path / str(count), processes=count)
    one, two = tmp_path / "1", tmp_path / "2"
    alone = replace(AuditReport.load(one), seconds={})
    assert {finding.attack for finding in alone.findings} >= ATTACKS
    assert [point.step for point in alone.finding("relearn-forget").points] == [0, 2]
    told = [two, two / "process-0.json", two / "process-1.json"]
    assert [replace(AuditReport.load(each), seconds={}) for each in told] == [alone] * 3
    assert {each.name for each in one.iterdir()} | {"process-1.json"} == {each.name for each in two.iterdir()}
    for name in ("audit.md", "audit-attacks.svg", "audit-relearning.png"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
