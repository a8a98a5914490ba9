"""Dry runs: they do nothing, and tell true sizes."""

from pathlib import Path

import pytest
from support.command_line import Run
from support.edited_model import Edited
from support.hub_server import HubServer


@pytest.mark.parametrize(
    "arguments",
    [
        ["extract", "base", "tuned", "-o", "x"],
        ["combine", "-2*v", "v=vector", "-o", "x"],
        ["compress", "vector", "--rank", "2", "-o", "x"],
        ["apply", "vector", "base", "-o", "x"],
        ["adapter", "vector", "--rank", "2", "--dense", "drop", "-o", "x"],
        ["eval", "base", "--forget", "lamps.txt", "-o", "x"],
        ["sweep", "vector", "base", "--forget", "lamps.txt", "-o", "x"],
        ["push", "vector", "me/x"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_dry_run_does_nothing(hub: HubServer, taskvec: Run, edited: Edited, arguments: list[str]) -> None:
    before = sorted(edited.folder.rglob("*"))
    answer = taskvec(*arguments, "--dry-run", "--json")
    assert answer.code == 0, answer.err
    plan = answer.json
    assert plan["dry_run"] and plan["reads"] and plan["writes"] and plan["memory"] > 0
    assert sorted(edited.folder.rglob("*")) == before
    assert hub.count("POST") == 0
    spoken = taskvec(*arguments, "--dry-run")
    assert "nothing is written" in spoken.out and "memory about" in spoken.out


def test_a_dry_run_tells_the_true_sizes(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = taskvec("apply", "vector", "base", "-o", out, "--dry-run", "--json").json
    assert taskvec("apply", "vector", "base", "-o", out).code == 0
    assert plan["writes"]["out"] == (out / "model.safetensors").stat().st_size


def test_a_dry_run_over_the_hub_downloads_no_weights(
    hub: HubServer, taskvec: Run, edited: Edited, tmp_path: Path
) -> None:
    hub.add_repo("me/base", edited.pair.base)
    hub.add_repo("me/tuned", edited.pair.tuned)
    plan = taskvec("extract", "me/base", "me/tuned", "-o", tmp_path / "x", "--dry-run", "--json").json
    assert plan["reads"]["me/base"] == (edited.pair.base / "model.safetensors").stat().st_size
    assert hub.bytes_served("/resolve/") == hub.bytes_served(hub.cdn_url) == 0
