"""The papers' claims, checked numerically: a table *claim – predicted – measured – holds*, with plots, on a CPU.

    python recipes/theory.py [--output outputs/theory] [--quick] [--only transformer gradients linearity decay]

1. transformer: the one-layer transformer of Li et al. (2025): where in λ adding, forgetting and transfer work.
2. gradients: one epoch of gradient descent makes task arithmetic exact; later the gap is −αη²C (Zhou et al. 2025).
3. linearity: features interpolate between models with a common pretraining (Zhou et al. 2024).
4. decay: weight decay, stable rank, and summing networks (Kuzborskij and Abbasi Yadkori 2025).

A claim that does not hold in these measurements says so. Thresholds were set before measuring and stayed. The set-up
did not: after first looks the runs were made shorter, the cases α = ±0.9 and other labels were added, networks that
collapsed are left out, and merged losses are the mean of five draws, because a single one decided either way. Theorems
speak of limits and hide constants, and these are small models.
"""

import argparse
import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from laboratory import decay, figures, gradients, linearity, transformer
from laboratory.claims import Claim, markdown

from hf_taskvec import atomic
from hf_taskvec.experiments.recipe_running import run_recipe
from hf_taskvec.figures import render

EXPERIMENTS = {
    "transformer": (transformer.run, {"one_layer": figures.transformer_figure, "transfer": figures.transfer_figure}),
    "gradients": (gradients.run, {"gap": figures.gradients_figure}),
    "linearity": (linearity.run, {"linearity": figures.linearity_figure}),
    "decay": (decay.run, {"weight_decay": figures.decay_figure}),
}


def main() -> None:
    """Measure, print each table, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/theory"), help="folder for the table and the plots"
    )
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: to see that it runs, not what holds")
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), help="some experiments only"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    claims: list[Claim] = []
    pictures = []
    for name in options.only:
        run, draw = EXPERIMENTS[name]
        start = time.perf_counter()
        result = run(options.quick)
        claims += result.claims
        for file, content in render({key: partial(each, result) for key, each in draw.items()}).items():
            atomic.write_bytes(options.output / file, content)
        pictures += [f"![{key}]({key}.png)" for key in draw]
        print(f"\n{markdown(result.claims)}({name}: {time.perf_counter() - start:.0f} s)", flush=True)
    kept = sum(claim.holds for claim in claims)
    note = "\n\n*Made with `--quick`: too small and too short to say what holds.*" if options.quick else ""
    summary = f"{kept} of {len(claims)} claims hold in these measurements.{note}"
    text = f"# The theory, measured\n\n{summary}\n\n{markdown(claims)}\n"
    atomic.write_text(options.output / "theory.md", text + "\n\n".join(pictures) + "\n")
    data = json.dumps([asdict(claim) for claim in claims], ensure_ascii=False, indent=1)
    atomic.write_text(options.output / "theory.json", data + "\n")
    print(f"\n{kept} of {len(claims)} claims hold. Saved: {options.output / 'theory.md'}")


if __name__ == "__main__":
    run_recipe(main)
