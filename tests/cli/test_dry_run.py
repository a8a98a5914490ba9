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
        ["apply", "vector", "base", "--push", "me/x"],
        ["adapter", "vector", "--rank", "2", "--dense", "drop", "-o", "x"],
        ["eval", "base", "--forget", "lamps.txt", "-o", "x"],
        ["sweep", "vector", "base", "--forget", "lamps.txt", "-o", "x"],
        ["audit", "vector", "tuned", "--forget", "lamps.txt", "--reference", "base", "-o", "x"],
        ["forget", "tuned", "--forget", "lamps.txt", "--retain", "boats.txt", "--base", "base", "-o", "x"],
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


def test_a_sweep_s_dry_run_counts_its_answers(taskvec: Run) -> None:
    books = ["--forget", "lamps.txt", "--retain", "boats.txt", "--set", "samples=3", "--scales", "0,-0.5,-1"]
    plan = taskvec("sweep", "vector", "base", *books, "--reference", "base", "-o", "x", "--dry-run", "--json").json
    # Of each book three seen passages and three that are held out, at three λ and by the reference.
    assert plan["notes"][-1].startswith("12 passages, asked 4 times: 48 answers")


@pytest.mark.parametrize(
    ("looser", "arguments"),
    [
        (2, ["extract", "base", "tuned"]),
        (1, ["extract", "base", "tuned", "--dtype", "float32"]),
        (1, ["extract", "base", "tuned", "--dtype", "bfloat16"]),
        (1, ["extract", "base", "tuned", "--reference"]),
        (100, ["extract", "lora"]),  # by the size of its file alone, and a megabyte for the record
        (1, ["combine", "-2*v", "v=vector"]),
        (1, ["combine", "v + 0.5*u", "v=vector", "u=lora"]),
        (1, ["combine", "v + 0.5*u", "v=vector", "u=lora", "--dtype", "float32"]),
        (1, ["combine", "filter(v, include='*mlp*')", "v=vector"]),
        (9, ["combine", "compress(v - u, energy=0.999)", "v=vector", "u=lora"]),
        (9, ["combine", "combine([v, u], 'ties', density=0.5)", "v=vector", "u=lora"]),
        (9, ["combine", "combine([v, u], 'without')", "v=vector", "u=lora"]),
        (99, ["combine", "combine([u, v], 'without', by='subspace', rank=9)", "v=vector", "u=lora"]),
        (9, ["combine", "combine([v, u], 'without', by='subspace')", "v=vector", "u=lora"]),
        (1, ["compress", "vector", "--rank", "2"]),
        (1, ["compress", "vector", "--rank", "1000"]),
        (2, ["compress", "vector", "--energy", "1.0"]),
        (1, ["apply", "vector", "base"]),
        (1, ["apply", "vector", "base", "--dtype", "bfloat16", "--max-shard-size", "20KB"]),
        (1, ["apply", "vector", "base", "--dtype", "float64"]),
        (1, ["apply", "vector", "base", "--scale", "-0.5", "--report", "report"]),
        (1, ["adapter", "vector", "--rank", "2", "--dense", "drop", "--base", "base"]),
        (2, ["adapter", "vector", "--rank", "2", "--dense", "save", "--base", "base"]),
        (1, ["adapter", "lora"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_dry_run_promises_no_less_than_is_written(
    taskvec: Run, edited: Edited, tmp_path: Path, looser: float, arguments: list[str]
) -> None:
    """And not much more: what the names and records take at most, and where two parts may be needed, twice as much."""
    if not (edited.folder / "lora").exists():
        layers = edited.vector.filter(include="*proj*").compress(rank=2)
        layers.to_adapter(edited.folder / "lora", base=edited.pair.base)
    if "--report" in arguments:
        edited.report.save(edited.folder / "report", plots=False)
    out = tmp_path / "out"
    promised = taskvec(*arguments, "-o", out, "--dry-run", "--json").json["writes"]["out"]
    assert "out: at most" in taskvec(*arguments, "-o", out, "--dry-run").out
    done = taskvec(*arguments, "-o", out)
    assert done.code == 0, done.err
    written = sum(path.stat().st_size for path in out.rglob("*"))
    tensors = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert written <= promised
    assert promised - written < (looser - 1) * tensors + 120_000


def test_a_dry_run_over_the_hub_promises_no_less_than_is_written(
    hub: HubServer, taskvec: Run, edited: Edited, tmp_path: Path
) -> None:
    hub.add_repo("me/a", edited.pair.base)
    hub.add_repo("me/b", edited.pair.tuned)
    hub.add_repo("me/v", edited.saved)
    for number, arguments in enumerate(
        [
            ["extract", "me/a", "me/b"],
            ["extract", "me/a", "me/b", "--dtype", "float32"],
            ["extract", "me/a", "me/b", "--reference"],
            ["combine", "-0.5*v", "v=me/v"],
            ["apply", "me/v", "me/a"],
            ["apply", "vector", "me/a", "--dtype", "float64"],
        ]
    ):
        out = tmp_path / f"out{number}"
        promised = taskvec(*arguments, "-o", out, "--dry-run", "--json").json["writes"][out.name]
        assert taskvec(*arguments, "-o", out).code == 0
        assert sum(path.stat().st_size for path in out.rglob("*")) <= promised
    unknown = taskvec("combine", "compress(v, rank=2)", "v=me/v", "-o", tmp_path / "x", "--dry-run").out
    assert "x: size not known before" in unknown


def test_a_dry_run_over_the_hub_downloads_no_weights(
    hub: HubServer, taskvec: Run, edited: Edited, tmp_path: Path
) -> None:
    hub.add_repo("me/base", edited.pair.base)
    hub.add_repo("me/tuned", edited.pair.tuned)
    plan = taskvec("extract", "me/base", "me/tuned", "-o", tmp_path / "x", "--dry-run", "--json").json
    assert plan["reads"]["me/base"] == (edited.pair.base / "model.safetensors").stat().st_size
    assert hub.bytes_served("/resolve/") == hub.bytes_served(hub.cdn_url) == 0
