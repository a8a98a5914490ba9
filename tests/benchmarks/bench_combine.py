"""Merging four models by TIES and DARE, and by a whole YAML, measured beside mergekit: one run, both sides, ratios.

    python tests/benchmarks/bench_combine.py --layers 2 --mergekit path/to/mergekit/venv/bin/python

Random models of Phi-1.5's width in bf16, with their files in memory. Both sides read five checkpoints and write one.
Times are those of the work without imports, on both sides; CPU time is that of all threads.
Memory is the peak of a process's anonymous memory, mapped files aside.
"""

import argparse
import os
from pathlib import Path

import bench_apply
from bench_apply import CONFIG, Watch, clear, make_model, warm_up

MODELS = 4
# Our rule and its options, and mergekit's method and its parameters.
RULES = {
    "TIES, density 0.2": ("ties", {"density": 0.2}, "ties"),
    "DARE, density 0.5": ("dare", {"density": 0.5}, "dare_linear"),
    "breadcrumbs, density 0.9": ("breadcrumbs", {"density": 0.9}, "breadcrumbs"),
}
# One file, which both sides run: gradients over the layers, filters by name.
YAML = "YAML: TIES, gradients, filters"
PARAMETERS = """\
parameters:
  normalize: true
  density: [0.5, 0.2]
  weight:
    - {filter: mlp, value: [0.3, 0.7]}
    - {value: 0.5}
"""


def job(folder: str, rule: str, option: str) -> None:
    """Our side, in a process of its own: prints one line of JSON."""
    from hf_taskvec import TaskVector, combine

    base = Path(folder) / "base"
    warm_up(str(base))
    if rule == "yaml":
        from hf_taskvec.integrations.mergekit_merge import open_merge

        with Watch():
            open_merge(base.parent / option).apply(base.parent / "out")
        return
    name, value = option.split("=")
    with Watch():
        vectors = [TaskVector.from_finetuned(base, base.parent / f"tuned{number}") for number in range(MODELS)]
        combine(vectors, rule, [0.5] * MODELS, **{name: float(value)}).apply(base, base.parent / "out")


def ours(folder: Path, rule: str, option: str) -> dict[str, float]:
    (found,) = bench_apply.run(str(folder), rule, option, script=__file__)
    clear(folder / "out")
    return found


def write_yaml(folder: Path, method: str, options: dict[str, float]) -> Path:
    """What both sides are to do: each model at a weight of 0.5, or by `PARAMETERS`."""
    models = "".join(
        f"  - model: {folder / f'tuned{number}'}\n"
        + ("    parameters:\n      weight: 0.5\n" if options else "")
        + "".join(f"      {name}: {value}\n" for name, value in options.items())
        for number in range(MODELS)
    )
    config = folder / "merge.yml"
    config.write_text(
        f"merge_method: {method}\nbase_model: {folder / 'base'}\ndtype: bfloat16\nmodels:\n{models}"
        + ("" if options else PARAMETERS)
    )
    return config


def mergekit(python: str, folder: Path, config: Path) -> dict[str, float]:
    found = bench_apply.mergekit_yaml(python, config, folder / "merged")
    clear(folder / "merged")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path("/dev/shm")
    parser.add_argument("--layers", type=int, default=2, help="layers of the models (Phi-1.5 has 24)")
    parser.add_argument("--vocabulary", type=int, default=CONFIG["vocab_size"], help="rows of the embeddings")
    parser.add_argument("--folder", type=Path, default=shared if shared.exists() else Path.cwd(), help="for the files")
    parser.add_argument(
        "--rules", nargs="+", choices=[*RULES, YAML], default=[*RULES, YAML], help="which rules; all by default"
    )
    parser.add_argument("--mergekit", help="the python of a virtual environment that has mergekit")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(*options.job)
        return
    folder = options.folder / "hf_taskvec_benchmark_combine"
    clear(folder)
    try:
        report(folder, options.layers, options.vocabulary, options.mergekit, options.rules)
    finally:
        clear(folder)


def report(folder: Path, layers: int, vocabulary: int, python: str | None, rules: list[str]) -> None:
    from hf_taskvec.models.layout import layout_of_config

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = {**CONFIG, "num_hidden_layers": layers, "vocab_size": vocabulary}
    shapes = layout_of_config(config).shapes
    make_model(folder / "base", config, shapes, seed=0)
    for number in range(MODELS):
        make_model(folder / f"tuned{number}", config, shapes, seed=number + 1, base=folder / "base")
    size = (folder / "base" / "model.safetensors").stat().st_size / 1e9
    print(
        f"\n{MODELS} models and their base, Phi-1.5's width, {layers} layers, bf16, {size:.2f} GB each; "
        "files in memory.\n"
    )
    print(
        "| rule | ours | mergekit | ratio | CPU: ours | mergekit | ratio | memory: ours | mergekit |\n"
        + "|---" * 9
        + "|"
    )
    for what in rules:
        rule, parameters, method = RULES.get(what, ("yaml", {}, "ties"))
        config = write_yaml(folder, method, parameters)
        mine = ours(folder, rule, next((f"{name}={value}" for name, value in parameters.items()), config.name))
        theirs = mergekit(python, folder, config) if python else dict.fromkeys(mine, float("nan"))
        cells = []
        for kind in ("seconds", "cpu"):
            cells += [f"{mine[kind]:.1f} s", f"{theirs[kind]:.1f} s", f"{theirs[kind] / mine[kind]:.1f}×"]
        cells += [f"{each['memory']:,.0f} MB" for each in (mine, theirs)]
        print(f"| {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
