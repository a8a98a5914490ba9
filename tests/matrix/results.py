"""Where outcomes are kept: what a run has found so far, and the committed ones that it is compared with.

A run writes each outcome when it has it, so that a killed run goes on where it was. Its folder is named after a digest
of the library, the checks and the versions: another library starts anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matrix.outcomes import Outcome

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).with_name("expected.json")
PACKAGES = ["transformers", "peft", "torch"]

LORA = "LoraConfig"
#: (row, check) -> outcome; a row is a model type, or `LoraConfig`, whose checks are its cases
Outcomes = dict[tuple[str, str], Outcome]


def versions() -> dict[str, str]:
    """The versions on which outcomes depend."""
    return {package: version(package).partition("+")[0] for package in PACKAGES}


@lru_cache
def run_folder() -> Path:
    """The folder of this library's run."""
    digest = hashlib.sha256(json.dumps(versions()).encode())
    for file in sorted([*ROOT.glob("hf_taskvec/**/*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return ROOT / "outputs" / "matrix" / digest.hexdigest()[:16]


def keep(row: str, check: str, outcome: Outcome) -> None:
    """Note an outcome; each process has a file of its own."""
    folder = run_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl").open("a") as file:
        file.write(json.dumps({"row": row, "check": check, **asdict(outcome)}) + "\n")


def kept() -> Outcomes:
    """All outcomes of this library's run so far. A line that was cut off is left out."""
    found: Outcomes = {}
    for file in sorted(run_folder().glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                key = record.pop("row"), record.pop("check")
                found[key] = Outcome(**{**record, "reasons": tuple(record["reasons"])})
    return found


def expected() -> tuple[dict[str, str], Outcomes]:
    """The committed versions and outcomes; none before the first table is written."""
    if not EXPECTED.exists():
        return {}, {}
    data = json.loads(EXPECTED.read_text("utf-8"))
    outcomes: Outcomes = {}
    for row, checks in data["outcomes"].items():
        for check, (kind, *reasons) in checks.items():
            outcomes[row, check] = Outcome(kind, tuple(data["reasons"][each] for each in reasons))
    return data["versions"], outcomes


def as_expected(outcomes: Outcomes) -> str:
    """The committed file's text. Reasons are told once, and named by a digest, so that a new one moves no other."""
    reasons: dict[str, str] = {}
    rows: dict[str, dict[str, list[str]]] = {}
    for (row, check), outcome in sorted(outcomes.items()):
        keys = [hashlib.sha256(reason.encode()).hexdigest()[:8] for reason in outcome.reasons]
        reasons.update(zip(keys, outcome.reasons, strict=True))
        rows.setdefault(row, {})[check] = [outcome.kind, *keys]
    lines = [f"{json.dumps(row)}: {_one_per_line(checks)}" for row, checks in rows.items()]
    return (
        f'{{\n"versions": {json.dumps(versions())},\n"outcomes": {{\n' + ",\n".join(lines) + "\n},\n"
        f'"reasons": {_one_per_line(dict(sorted(reasons.items())))}\n}}\n'
    )


def _one_per_line(data: dict[str, Any]) -> str:
    lines = [
        f"  {json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in data.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}"


def differences(found: Outcomes, committed: Outcomes, keys: Iterable[tuple[str, str]], reasons: bool) -> list[str]:
    """What is not as committed, one line each; `reasons` asks for the same reasons, too."""
    lines = []
    for row, check in keys:
        now, before = found[row, check], committed.get((row, check), Outcome("nothing"))
        if now.kind != before.kind:
            lines.append(f"{row} / {check}: {before.kind} is committed, {now.kind} was found: {now.detail[-1500:]}")
        elif reasons and now.reasons != before.reasons:
            lines.append(
                f"{row} / {check}: {now.kind} for another reason: {sorted(set(now.reasons) ^ set(before.reasons))}"
            )
    return lines
