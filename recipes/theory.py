"""The papers' claims, checked numerically: *claim – where – predicted – measured – holds*, with figures, on a CPU.

    python recipes/theory.py                                   # everything; a run that was stopped goes on
    python recipes/theory.py --quick                           # small and short: to see that it runs
    python recipes/theory.py --only transformer gradients      # some sections; the report keeps the others
    python recipes/theory.py --list                            # what each section is about

A claim that does not hold in these measurements says so. What counts as holding was set before the runs that are
reported (`laboratory/thresholds.py`) and stayed. The set-up did not: what was changed after first looks is told where
it stands. Misprints are listed apart. Theorems speak of limits and hide constants, and these are small models.

Each section is kept in the output folder when it is done (`<section>.json`, its figures), and done again when its code,
the thresholds or `--quick` change.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from laboratory.claims import Claim, counted, markdown, side_by_side
from laboratory.sections import SECTIONS, Section

from hf_taskvec import atomic
from hf_taskvec.experiments.recipe_running import run_recipe
from hf_taskvec.figures import render


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet, print each table, and write the report."""
    options = parse(arguments)
    if options.list:
        for name, section in SECTIONS.items():
            print(f"{name:12} {section.about}")
        return
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        SECTIONS[name].check()
    for name in options.only:
        kept = read(options.output, name, fingerprint(name, options.quick))
        claims = measure(options.output, name, options.quick) if options.again or kept is None else kept
        print(f"\n{markdown(claims)}({name}{': kept from before' if claims is kept else ''})", flush=True)
    write_report(options.output, options.quick)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/theory"), help="folder for the report")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: to see that it runs, not what holds")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections only")
    parser.add_argument("--again", action="store_true", help="measure again what is there already")
    parser.add_argument("--list", action="store_true", help="print what the sections are about, and stop")
    return parser.parse_args(arguments)


def fingerprint(name: str, quick: bool) -> str:
    """What a kept section was made with: its code and the thresholds."""
    folder = Path(__file__).parent / "laboratory"
    sources = [folder / f"{source}.py" for source in ("thresholds", *SECTIONS[name].sources)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources) + bytes([quick])).hexdigest()[:16]


def read(output: Path, name: str, state: str | None) -> list[Claim] | None:
    """The claims of a section that is there, if it was made so; with None, however it was made."""
    path = output / f"{name}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text("utf-8"))
    return [Claim(**claim) for claim in found["claims"]] if state in (None, found["state"]) else None


def measure(output: Path, name: str, quick: bool) -> list[Claim]:
    """Run a section; its figures and claims are written when it is done."""
    section: Section = SECTIONS[name]
    start, used = time.perf_counter(), time.process_time()
    result = section.run(quick)
    took = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - used}
    for file, content in render({key: partial(draw, result) for key, draw in section.figures.items()}).items():
        atomic.write_bytes(output / file, content)
    kept = {"state": fingerprint(name, quick), **took, "claims": [asdict(claim) for claim in result.claims]}
    atomic.write_text(output / f"{name}.json", json.dumps(kept, ensure_ascii=False, indent=1) + "\n")
    return list(result.claims)


def write_report(output: Path, quick: bool) -> None:
    """One report of all sections in the folder; those of other code are left out by name."""
    claims: list[Claim] = []
    pictures, stale, missing = [], [], []
    for name, section in SECTIONS.items():
        found = read(output, name, fingerprint(name, quick))
        if found is None:
            (missing if read(output, name, None) is None else stale).append(name)
            continue
        claims += found
        pictures += [f"![{key}]({key}.png)" for key in section.figures]
    kept = sum(claim.holds for claim in counted(claims))
    notes = [f"{kept} of {len(counted(claims))} claims hold in these measurements."]
    if quick:
        notes.append("*Made with `--quick`: too small and too short to say what holds.*")
    if stale or missing:
        notes.append(f"Not in this report: {', '.join(missing + [f'{name} (of other code)' for name in stale])}.")
    parts = ["# The theory, measured", *notes, markdown(claims), side_by_side(claims), *pictures]
    atomic.write_text(output / "theory.md", "\n\n".join(part for part in parts if part) + "\n")
    data = json.dumps([asdict(claim) for claim in claims], ensure_ascii=False, indent=1)
    atomic.write_text(output / "theory.json", data + "\n")
    print(f"\n{notes[0]} Saved: {output / 'theory.md'}")


if __name__ == "__main__":
    run_recipe(main)
