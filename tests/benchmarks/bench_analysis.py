"""Analysing task vectors of Phi-1.5's size: cosines and stable ranks beside the time of reading the files.

    python tests/benchmarks/bench_analysis.py [--layers 24] [--folder a/folder/in/memory] [--disk a/folder/on/a/disk]
    python tests/benchmarks/bench_analysis.py --model a/model/folder     # stable ranks of a real model only

Random models of Phi-1.5's shape in bf16: a base, four fine-tunes; and four rank-32 adapters. Every job runs in a
process of its own, which also watches its own anonymous memory. Times are those of the job alone, without imports; the
CPU time beside them says more on a busy machine. Adapters have all 24 layers, whatever the models have. With `--disk`
the model is also read from there, after its pages were dropped from the cache.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import bench_apply
from bench_apply import CONFIG, Watch, clear, command, make_adapter, make_model

COUNT = 4


def make_inputs(folder: Path, layers: int) -> None:
    from hf_taskvec.models.layout import layout_of_config

    config = {**CONFIG, "num_hidden_layers": layers}
    shapes = layout_of_config(config).shapes
    make_model(folder / "base", config, shapes, seed=0)
    for number in range(COUNT):
        make_model(folder / f"tuned{number}", config, shapes, seed=1 + number, base=folder / "base")
    whole = layout_of_config({**CONFIG, "num_hidden_layers": 24}).shapes
    for number in range(COUNT):
        make_adapter(folder / f"adapter{number}", folder / "whole", whole, seed=10 + number)
    (folder / "whole").mkdir()
    (folder / "whole" / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 24}))


# The jobs.


def job_dense_cosines(folder: str) -> None:
    from hf_taskvec import TaskVector
    from hf_taskvec.analysis import cosine_matrix

    base = Path(folder) / "base"
    vectors = [TaskVector.from_finetuned(base, Path(folder) / f"tuned{n}", name=f"v{n}") for n in range(COUNT)]
    with Watch(warm=1 << 28):
        cosine_matrix(vectors, progress=False)


def job_one_pass(folder: str) -> None:
    """What it takes to make one dense vector's numbers and square them."""
    from hf_taskvec import TaskVector

    vector = TaskVector.from_finetuned(Path(folder) / "base", Path(folder) / "tuned0")
    with Watch(warm=1 << 28):
        vector.norm()


def job_model_pass(folder: str) -> None:
    """What it takes to read a model's numbers from its file and square them."""
    from hf_taskvec.algebra import measures
    from hf_taskvec.algebra.deltas import Dense
    from hf_taskvec.algebra.sums import Term
    from hf_taskvec.models.checkpoint import open_checkpoint
    from hf_taskvec.threads import workers

    open_checkpoint(Path(folder) / "base")  # imports transformers
    with Watch(warm=1 << 28), workers() as run:
        terms = {n: (Term(1.0, Dense((t,))),) for n, t in open_checkpoint(Path(folder) / "base").tensors.items()}
        sum(run(lambda each: measures.norm(*each), terms.items()))


def job_factor_cosines(folder: str) -> None:
    from hf_taskvec import TaskVector
    from hf_taskvec.analysis import cosine_matrix

    vectors = [TaskVector.from_adapter(Path(folder) / f"adapter{n}", name=f"v{n}") for n in range(COUNT)]
    with Watch(warm=1 << 28):
        cosine_matrix(vectors, progress=False)


def job_model_ranks(folder: str) -> None:
    from hf_taskvec.analysis import stable_ranks
    from hf_taskvec.models.checkpoint import open_checkpoint

    open_checkpoint(Path(folder) / "base")  # imports transformers
    with Watch(warm=1 << 28):
        stable_ranks(Path(folder) / "base", progress=False)


def job_vector_ranks(folder: str) -> None:
    from hf_taskvec import TaskVector
    from hf_taskvec.analysis import stable_ranks

    vector = TaskVector.from_finetuned(Path(folder) / "base", Path(folder) / "tuned0")
    with Watch(warm=1 << 28):
        stable_ranks(vector, progress=False)


def job_factor_ranks(folder: str) -> None:
    from hf_taskvec import TaskVector
    from hf_taskvec.analysis import stable_ranks

    vector = TaskVector.from_adapter(Path(folder) / "adapter0")
    with Watch(warm=1 << 28):
        stable_ranks(vector, progress=False)


def job_accuracy_of_random(folder: str) -> None:
    """How far the spectral norms of random matrices of Phi-1.5's shapes are from LAPACK's."""
    import torch

    from hf_taskvec import TaskVector
    from hf_taskvec.analysis import stable_ranks

    errors = []
    for seed in range(12):
        for shape in ((2048, 2048), (8192, 2048), (2048, 8192)):
            matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
            vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": matrix})
            (found,) = stable_ranks(vector, progress=False).matrices
            exact = matrix.float() if shape[0] <= shape[1] else matrix.float().T
            largest = torch.linalg.eigvalsh(exact @ exact.T)[-1].sqrt().item()
            errors.append(1 - found.spectral / largest)
    middle = sorted(errors)[len(errors) // 2]
    print(json.dumps({"median": middle, "worst": max(errors), "count": len(errors)}))


def job_accuracy(folder: str) -> None:
    """How far some spectral norms are from LAPACK's."""
    import torch

    from hf_taskvec.analysis import stable_ranks
    from hf_taskvec.models.checkpoint import open_checkpoint

    ranks = stable_ranks(Path(folder) / "base", progress=False)
    tensors = open_checkpoint(Path(folder) / "base").tensors
    errors = []
    for matrix in [m for m in ranks.matrices if m.layer in (0, 7) and len(m.names) == 1]:
        exact = torch.linalg.matrix_norm(tensors[matrix.names[0]].read().float(), 2).item()
        errors.append(abs(matrix.spectral / exact - 1))
    print(json.dumps({"worst": max(errors)}))


def run(job: str, folder: Path, times: int = 1) -> dict[str, float]:
    """The quickest of some runs."""
    found = [bench_apply.run(job, folder, script=__file__)[0] for _ in range(times)]
    return min(found, key=lambda each: each.get("cpu", 0.0))


def forget(file: Path) -> None:
    """Have a file read from its disk the next time."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_cold(job: str, folder: Path, times: int = 3) -> dict[str, float]:
    """The quickest of some runs that read the model from its disk."""
    found = []
    for _ in range(times):
        forget(folder / "base" / "model.safetensors")
        found.append(run(job, folder))
    return min(found, key=lambda each: each["seconds"])


def report(folder: Path, layers: int, disk: Path | None = None) -> None:
    make_inputs(folder, layers)
    size = (folder / "base" / "model.safetensors").stat().st_size / 1e9
    print(f"\nModels of Phi-1.5's shape, {layers} layers, bf16, {size:.2f} GB each; files in {folder.parent}.\n")
    files = " ".join(
        str(folder / name / "model.safetensors") for name in ("base", *(f"tuned{n}" for n in range(COUNT)))
    )
    reading = min(command(["sh", "-c", f"cat {files} > /dev/null"]) for _ in range(2))
    one, of_model = run("one_pass", folder, 3), run("model_pass", folder, 3)
    print("| what | time | CPU time | beside | peak anonymous memory |\n|---|---|---|---|---|")

    def row(what: str, found: dict[str, float], beside: str) -> None:
        print(
            f"| {what} | {found['seconds']:.2f} s | {found['cpu']:.2f} s | {beside} | {found['memory']:.0f} MB |",
            flush=True,
        )

    row("norm of the model: one pass over its file", of_model, "")
    row("norm of one dense vector: one pass over two files", one, "")
    dense = run("dense_cosines", folder)
    ratio = dense["cpu"] / one["cpu"]
    row(
        f"cosine matrix of {COUNT} dense vectors",
        dense,
        f"{ratio:.1f}× the norm of one; {dense['seconds'] / reading:.2f}× of `cat` of the {COUNT + 1} files (time)",
    )
    row(f"cosine matrix of {COUNT} rank-32 vectors", run("factor_cosines", folder, 2), "")
    for what, job, once in (("the model", "model_ranks", of_model), ("a dense vector", "vector_ranks", one)):
        found = run(job, folder)
        row(f"stable ranks of {what}, all matrices", found, f"{found['cpu'] / once['cpu']:.1f}× its norm")
    row("stable ranks of a rank-32 vector, all matrices", run("factor_ranks", folder), "")
    if disk is not None:
        shutil.copytree(folder / "base", disk / "base")
        one, found = run_cold("model_pass", disk), run_cold("model_ranks", disk)
        row("norm of the model, from a disk", one, "")
        row(
            "stable ranks of the model, from a disk", found, f"{found['seconds'] / one['seconds']:.1f}× its norm (time)"
        )
    found = run("accuracy_of_random", folder)
    print(
        f"\nSpectral norms of {found['count']} random matrices of these shapes, which are slow to converge: "
        f"{found['median']:.1%} "
        f"below LAPACK's (median), {found['worst']:.1%} at worst."
    )


def report_model(folder: Path, model: Path) -> None:
    """Stable ranks of a real model, whose spectra are not flat."""
    folder.mkdir(parents=True)
    (folder / "base").symlink_to(model.resolve())
    one, ranks = run("model_pass", folder, 2), run("model_ranks", folder, 2)
    worst = run("accuracy", folder)["worst"]
    print(
        f"Stable ranks of {model.name}, all matrices: {ranks['seconds']:.2f} s, CPU {ranks['cpu']:.2f} s, "
        f"{ranks['cpu'] / one['cpu']:.1f}× one norm of its weights (CPU {one['cpu']:.2f} s); {ranks['memory']:.0f} MB; "
        "at most "
        f"{worst:.1e} (relative) from LAPACK's."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="layers of the model (24 as Phi-1.5 has)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the files go")
    parser.add_argument("--disk", type=Path, help="also measure with the model on this disk, and not in its cache")
    parser.add_argument("--model", type=Path, help="a model folder: measure its stable ranks, and nothing else")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        globals()[f"job_{options.job[0]}"](options.job[1])
        return
    folder = options.folder / "hf_taskvec_analysis_benchmark"
    disk = options.disk / "hf_taskvec_analysis_on_disk" if options.disk else None
    places = [place for place in (folder, disk) if place is not None]
    try:
        clear(*places)
        report_model(folder, options.model) if options.model else report(folder, options.layers, disk)
    finally:
        clear(*places)


if __name__ == "__main__":
    main()
