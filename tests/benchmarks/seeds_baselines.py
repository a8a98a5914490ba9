"""Task vectors beside the usual unlearning methods, over seeds: the table of docs/results.md.

    python tests/benchmarks/seeds_baselines.py --model FOLDER_OF_STORIES15M \\
        --books forget=wizard.txt aligned=land.txt retain=pride.txt
    python tests/benchmarks/seeds_baselines.py --only-table          # what docs/evidence has so far

Each seed is one run of recipes/baselines.py with the settings below. Of every book 1,680 words are seen and 720 held
out; θ_0' is stories15M fine-tuned on all three, the reference on the two to keep. Every method's edit is chosen by
the criteria on one half of the passages, and all numbers are from the other half; the attacks are made on all
passages.

- `task vector`: −λτ, the best of the paper's λ.
- `repair`: the negation and its first repair, half of a retraining; `repair, searched`: what `hf_taskvec.forget` would
  find, with at most one repair more.
- `MUSE's task vector`: θ_0' trained further on the book, subtracted, the best of the same λ.
- `ga`, `grad_diff`, `npo`, `simnpo`, `rmu`: the authors' settings, the best of three learning rates, each trained on
  half as many tokens as a retraining.

A finished seed is a file in docs/evidence/baselines, from which the table is made, and is not run again.

What was fixed before the reported seeds (60 to 62): all settings in this file, which no run on this model had part in
choosing (those of our own repair come from the script for edits over seeds, which is unfair to the others: their grid
is all the search that they had). Reported is every method, whatever it says. Expected: that the task vector and
MUSE's stop generating the book and still predict it; that GA and NPO at the larger rates destroy the kept books and
at the smallest change next to nothing; that GradDiff and SimNPO come nearer by forgetting beyond never seen; that RMU
changes the least; that `repair` is the only one whose four R are all within 0.8 and 1.2, losing 5 to 30 % of a kept
book; and that relearning half of the book brings it back for all but `repair`.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_taskvec.evaluation.reporting.verdict_tables import markdown_table
from hf_taskvec.evaluation.scoring.metrics import PRIMARY
from hf_taskvec.sizes import memory_size

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "baselines"
SETTINGS = {
    "config": "stories15m",
    "words": "2400",
    "section-words": "150",
    "held-out": "0.3",
    "block-stride": "128",
    "batch-size": "4",
    "prompt-length": "12",
    "answer-length": "12",
    "repair-batch-size": "2",
    "repair-learning-rate": "4e-4",
    "edit-rounds": "2",
    "audit": "true",
    "audit-passages": "70",
    "checkpoint-every": "0",
}
LISTS = {
    "scales": ["0", "-0.2", "-0.4", "-0.6", "-0.8", "-1"],
    "method-learning-rates": ["1e-5", "1e-4", "1e-3"],
    "audit-attacks": ["relearn", "quantise", "prompt"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="θ_0: a folder")
    parser.add_argument("--books", nargs=3, metavar="ROLE=FILE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[60, 61, 62])
    parser.add_argument("--output", type=Path, default=Path("outputs/seeds-baselines"))
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="where finished seeds are written")
    parser.add_argument("--only-table", action="store_true", help="run nothing; show what is finished")
    options = parser.parse_args()
    for seed in () if options.only_table else options.seeds:
        path = options.evidence / f"seed-{seed}.json"
        if not path.exists():
            run_seed(options, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((options.output / str(seed) / "comparison.json").read_text("utf-8"), "utf-8")
    found = [json.loads(path.read_text("utf-8")) for path in sorted(options.evidence.glob("*.json"))]
    print(table(found), attack_table(found), sep="\n\n")


def run_seed(options: argparse.Namespace, seed: int) -> None:
    spec = importlib.util.spec_from_file_location("baselines_recipe", ROOT / "recipes" / "baselines.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    output = options.output / str(seed)
    flags = SETTINGS | {"base-model": options.model, "seed": str(seed), "output": str(output)}
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    given += [part for name, values in LISTS.items() for part in (f"--{name}", *values)]
    recipe.main([*given, "--prose", "false", "--books", *options.books])  # as the first seeds were made


def table(seeds: list[list[dict[str, Any]]]) -> str:
    """One row for each method over all seeds, on the half of the passages that did not choose."""
    heads = ["method", "edits", *(f"R, {metric}" for metric in PRIMARY), "AUC − never seen", "kept books lost, at most"]
    heads += ["four R within 0.8–1.2", "passes", "cost, in retrainings", "seconds", "memory of the steps"]
    rows = []
    for method, runs in by_method(seeds).items():
        made = [run for run in runs if "R" in run]
        edits = ", ".join(dict.fromkeys(run["edit"].removeprefix(f"{method}, ") for run in runs))
        if not made:
            rows.append([method, edits, *["–"] * (len(heads) - 3), "diverged"])
            continue
        cells = [spread([run["R"][metric] for run in made]) for metric in PRIMARY]
        cells.append(spread([run["AUC"][0][1] for run in made], sign=True))
        cells.append(spread([100 * max(run["lost"].values()) for run in made], digits=0) + " %")
        within = sum(all(r is not None and 0.8 <= r <= 1.2 for r in run["R"].values()) for run in made)
        passed = sum(run["outcome"] == "as_if_never_seen" and run["kept"] == "kept" for run in made)
        cells += [f"{within}/{len(runs)}", f"{passed}/{len(runs)}"]
        peaks = [run["peak_bytes"] for run in made if run["peak_bytes"] is not None]
        # The quickest: a machine that does other things as well makes a run slower, never faster.
        cells += [f"{fmean(run['retrainings'] for run in made):.2f}", f"{min(run['seconds'] for run in made):.0f}"]
        rows.append([method, edits, *cells, memory_size(max(peaks)) if peaks else "–"])
    return markdown_table(heads, rows)


def attack_table(seeds: list[list[dict[str, Any]]]) -> str:
    """R by the loss under each attack, of those of a group the lowest; and how many attacks find the book known."""
    methods = {name: runs for name, runs in by_method(seeds).items() if any(run.get("attacks") for run in runs)}
    attacks = dict.fromkeys(name for runs in methods.values() for run in runs for name in run.get("attacks", ()))
    groups: dict[str, list[str]] = {}
    for name in attacks:
        groups.setdefault(name if name.startswith("relearn") else name.partition("-")[0], []).append(name)
    heads = [group if len(names) == 1 else f"{group}, lowest of {len(names)}" for group, names in groups.items()]
    rows = []
    for method, runs in methods.items():
        found = [run["attacks"] for run in runs if run.get("attacks")]
        lowest = [
            [min(each[name]["relative"]["loss"] for name in names) for each in found] for names in groups.values()
        ]
        known = sum(each["outcome"] == "still_known" for run in found for each in run.values())
        rows.append([method, *map(spread, lowest), f"{known} of {len(found) * len(attacks)}"])
    return markdown_table(["method", *heads, "surely known"], rows)


def by_method(seeds: list[list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in seeds:
        for run in seed:
            found.setdefault(run["method"], []).append(run)
    return found


def spread(values: list[float | None], digits: int = 2, sign: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    form = f"{'+' if sign else ''}.{digits}f"
    numbers = (round(value, digits) + 0.0 for value in (fmean(known), min(known), max(known)))  # no −0.00
    mean, low, high = (f"{value:{form}}".replace("-", "−") for value in numbers)
    return f"{mean} [{low}, {high}]" if len(known) > 1 else mean


if __name__ == "__main__":
    main()
