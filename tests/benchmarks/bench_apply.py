"""Applying task vectors, measured beside mergekit and PEFT: one run, both sides, ratios.

    make bench                                        # sets up a venv for mergekit and runs everything
    python tests/benchmarks/bench_apply.py --layers 4 --mergekit path/to/mergekit/venv/bin/python
    python tests/benchmarks/bench_apply.py --layers 8 --rows saved live     # some of the rows

A random model of Phi-1.5's shape in bf16, with its files in memory. Every job runs in a process of its own, which also
watches its own anonymous memory. Times are those of the job alone, without imports, on both sides. A virtual machine
may hand free memory to its host, and getting it again may take longer than a job: with `--take-memory` it is taken and
given back before each job, which takes minutes in all, and flatters whoever needs much memory.
"""

import argparse
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

CONFIG = {
    "architectures": ["PhiForCausalLM"],
    "model_type": "phi",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.5,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
TARGETS = ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"]
RANK = 32
WARM, WARM_FOR_PEERS = 7 << 29, 8 << 30  # bytes of memory to have at hand: what a job writes and holds
TAKE_MEMORY = "HF_TASKVEC_BENCHMARK_TAKES_MEMORY"  # says so to the jobs


# The inputs.


def make_inputs(folder: Path, layers: int) -> None:
    import torch

    from hf_taskvec.models.layout import layout_of_config

    config = {**CONFIG, "num_hidden_layers": layers}
    shapes = layout_of_config(config).shapes
    make_model(folder / "base", config, shapes, seed=0)
    make_model(folder / "tuned", config, shapes, seed=1, base=folder / "base")
    make_model(folder / "other", config, shapes, seed=2, base=folder / "base")
    for number in (1, 2):
        make_adapter(folder / f"adapter{number}", folder / "base", shapes, seed=10 + number)
    torch.manual_seed(0)


def make_model(folder: Path, config: dict, shapes: dict, seed: int, base: Path | None = None) -> None:
    import torch
    from safetensors import safe_open

    from hf_taskvec.algebra.sources import numel
    from hf_taskvec.files.safetensors_writer import SafetensorsWriter, TensorSpec

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
    writer = SafetensorsWriter(folder / "model.safetensors", specs, {"format": "pt"})
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(seed)) * (0.02 if base is None else 0.002)
    old = safe_open(base / "model.safetensors", "pt") if base else None
    for name, shape in shapes.items():
        count = numel(shape)
        values = noise.repeat(-(-count // noise.numel()))[:count].view(shape)
        if old is not None:
            values = values + old.get_tensor(name).float()
        writer.write(name, values.bfloat16())
    writer.close(sync=False)


def make_adapter(folder: Path, base: Path, shapes: dict, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module.split(".")[-1] in TARGETS:
            a = torch.randn(RANK, shape[1], generator=generator) * 0.02
            b = torch.randn(shape[0], RANK, generator=generator) * 0.02
            tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": RANK}
    config |= {"lora_alpha": RANK, "target_modules": TARGETS, "bias": "none", "fan_in_fan_out": False}
    (folder / "adapter_config.json").write_text(json.dumps(config))


# The jobs: each runs in a process of its own and prints one line of JSON.


class Watch:
    """Seconds, those of the processor, and the peak of this process's anonymous memory above where it started."""

    def __init__(self, warm: int = WARM) -> None:
        self._warm = warm

    def __enter__(self) -> "Watch":
        warm_memory(self._warm)
        self._start_memory, self._peak, self._over = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._start, self._start_cpu = time.perf_counter(), time.process_time()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._peak = max(self._peak, anonymous())

    def __exit__(self, *_: object) -> None:
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._start_cpu
        self._over.set()
        self._thread.join()
        print(json.dumps({"seconds": seconds, "cpu": cpu, "memory": max(0, self._peak - self._start_memory) / 1024}))


def warm_memory(size: int = WARM) -> None:
    if TAKE_MEMORY not in os.environ:
        return
    with mmap.mmap(-1, size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def job_dense(base: str, tuned: str, target: str, out: str, scale: str) -> None:
    import hf_taskvec.application.to_checkpoint  # noqa: F401
    from hf_taskvec import TaskVector

    warm_up(base)
    with Watch():
        TaskVector.from_finetuned(base, tuned).apply(target, out, scale=float(scale))


def job_save(base: str, tuned: str, out: str) -> None:
    from hf_taskvec import TaskVector

    warm_up(base)
    with Watch():
        TaskVector.from_finetuned(base, tuned).save(out)


def job_load(base: str, vector: str, out: str, scale: str) -> None:
    import hf_taskvec.application.to_checkpoint  # noqa: F401
    from hf_taskvec import TaskVector

    warm_up(base)
    with Watch():
        TaskVector.load(vector).apply(base, out, scale=float(scale))


def job_mixed(base: str, tuned: str, other: str, out: str) -> None:
    from hf_taskvec import TaskVector

    one, two = TaskVector.from_finetuned(base, tuned, name="one"), TaskVector.from_finetuned(base, other, name="two")
    (-0.7 * one + 0.2 * two).apply(other, out)


def job_many(base: str, count: str, out: str, *tuned: str) -> None:
    import hf_taskvec.application.to_checkpoint  # noqa: F401
    from hf_taskvec import TaskVector

    warm_up(base)
    with Watch():
        vector = sum(TaskVector.from_finetuned(base, each) for each in tuned[: int(count)])
        vector.apply(base, out, scale=-0.1)


def job_adapter(base: str, adapter: str, out: str) -> None:
    import peft  # noqa: F401

    import hf_taskvec.application.to_checkpoint  # noqa: F401
    from hf_taskvec import TaskVector

    warm_up(base)
    with Watch():
        (-TaskVector.from_adapter(adapter)).apply(base, out)


def job_compress(one: str, other: str, out: str) -> None:
    import peft  # noqa: F401

    from hf_taskvec import TaskVector

    warm_up(str(Path(one).parent / "base"))
    with Watch():
        (TaskVector.from_adapter(one) + TaskVector.from_adapter(other)).compress(rank=RANK).save(out)


def job_expression(base: str, tuned: str) -> None:
    from hf_taskvec import TaskVector

    vectors = [TaskVector.from_finetuned(base, tuned, name=f"v{number}") for number in range(10)]
    with Watch():
        expression = sum((number + 1) * vector for number, vector in enumerate(vectors))
    assert len(expression) == len(vectors[0])


def job_live(base: str, tuned: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from hf_taskvec import TaskVector
    from hf_taskvec.models.checkpoint import open_checkpoint

    vector = TaskVector.from_finetuned(base, tuned)
    AutoModelForCausalLM.from_pretrained(base)
    with Watch():  # what another λ costs without edits: loading the model again
        model = AutoModelForCausalLM.from_pretrained(base)
        for parameter in model.parameters():  # so far only mapped
            parameter.data = parameter.data.clone()
    edit = vector.edit(model, -0.2, original=base)
    with Watch():
        edit.set_scale(-0.4)
    with Watch():
        edit.set_scale(-1.0)
    edit.restore()
    weights = dict(model.named_parameters())
    pairs = [(open_checkpoint(each).tensors) for each in (base, tuned)]
    tensors = [(pairs[0][name].read(), pairs[1][name].read(), weight) for name, weight in weights.items()]
    for watch in (nullcontext(), Watch()):  # as the edit has done before, the files are mapped when it counts
        with watch, torch.no_grad():  # one pass: what the edit reads is read, and what it writes is written
            for one, other, weight in tensors:
                torch.add(one, other, out=weight)


def job_first(base: str, tuned: str) -> None:
    """What the first sum of a process takes beside the next ones: the expression is compiled."""
    import torch

    from hf_taskvec.algebra.deltas import Difference
    from hf_taskvec.algebra.sums import Sum, Term
    from hf_taskvec.models.checkpoint import open_checkpoint

    stored = [open_checkpoint(each).tensors["model.embed_tokens.weight"] for each in (base, tuned)]
    torch.zeros(1).add_(1)
    for _ in range(2):
        with Watch():
            Sum(stored[0].shape, [Term(-0.6, Difference(stored[1], stored[0]))], stored[0]).rounded(
                0, 256, torch.bfloat16, "w"
            )


def job_peft_merge(base: str, adapter: str, out: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with Watch(WARM_FOR_PEERS):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.neg_()
        model.merge_and_unload().save_pretrained(out)


def job_peft_svd(base: str, one: str, other: str, layers: str) -> None:
    """PEFT's recompression of a few layers: a smaller model, so that nothing else is in the time."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    config.num_hidden_layers = int(layers)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), one, adapter_name="one")
    model.load_adapter(other, "other")
    with Watch():
        model.add_weighted_adapter(["one", "other"], [1.0, 1.0], "sum", combination_type="svd", svd_rank=RANK)


def job_mergekit(*arguments: str) -> None:
    from mergekit.scripts.run_yaml import main

    with Watch(WARM_FOR_PEERS):
        main(arguments, standalone_mode=False)


def warm_up(base: str) -> None:
    """Imports and the first meta model cost the same whatever is done afterwards."""
    from hf_taskvec.models.checkpoint import open_checkpoint

    open_checkpoint(base)


# Running them.


def run(job: str, *arguments: object, python: str = sys.executable, script: str = __file__) -> list[dict[str, float]]:
    command = [python, script, "--job", job, *map(str, arguments)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def command(arguments: list[str]) -> float:
    warm_memory()
    start = time.perf_counter()
    subprocess.run(arguments, check=True, capture_output=True)
    return time.perf_counter() - start


def mergekit_config(folder: Path, model: str, scale: float) -> Path:
    config = folder / "merge.yml"
    config.write_text(
        f"merge_method: task_arithmetic\nbase_model: {folder / 'base'}\ndtype: bfloat16\nmodels:\n"
        f"  - model: {model}\n    parameters:\n      weight: {scale}\nparameters:\n  normalize: false\n"
    )
    return config


def mergekit(python: str, folder: Path, model: str, scale: float) -> dict[str, float]:
    config = mergekit_config(folder, model, scale)
    return mergekit_yaml(python, config, folder / "merged", "--lora-merge-cache", folder / "cache")


def mergekit_yaml(python: str, config: Path, out: Path, *flags: object) -> dict[str, float]:
    return run("mergekit", config, out, "--allow-crimes", "--no-copy-tokenizer", *flags, python=python)[0]


def misrounded(out: Path, target: Path, base: Path, changes: dict[Path, float]) -> tuple[int, int]:
    """How many elements differ from `sum(λ (tuned - base)) + target`, rounded once, and how many there are."""
    import torch
    from safetensors import safe_open

    def open_all(where: Path) -> dict:
        files = [safe_open(path, "pt") for path in sorted(where.glob("*.safetensors"))]
        return {name: file for file in files for name in file.keys()}  # noqa: SIM118

    written, onto, before = (open_all(each) for each in (out, target, base))
    tuned = [open_all(each) for each in changes]
    wrong = total = 0
    for name in onto:
        tensors = (file[name].get_tensor(name).flatten().split(1 << 22) for file in (written, onto, before, *tuned))
        for found, start, b, *others in zip(*tensors, strict=True):
            parts = [scale * (t.double() - b.double()) for t, scale in zip(others, changes.values(), strict=True)]
            bits = (sum(parts[1:], parts[0]) + start.double()).view(torch.int64)
            nearest = ((bits + ((1 << 44) - 1) + ((bits >> 45) & 1)) >> 45 << 45).view(torch.float64).bfloat16()
            wrong += int((nearest.view(torch.int16) != found.view(torch.int16)).sum())
            total += b.numel()
    return wrong, total


def clear(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path("/dev/shm")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model (24 as Phi-1.5 has)")
    parser.add_argument(
        "--folder", type=Path, default=shared if shared.exists() else Path.cwd(), help="where the files go"
    )
    parser.add_argument("--mergekit", help="the python of a virtual environment that has mergekit")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], help="which rows; all by default")
    parser.add_argument("--take-memory", action="store_true", help="take memory and give it back before each job")
    parser.add_argument("--job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        globals()[f"job_{options.job[0]}"](*options.job[1:])
        return
    if options.take_memory:
        os.environ[TAKE_MEMORY] = "1"
    folder = options.folder / "hf_taskvec_benchmark"
    clear(folder)
    try:
        report(folder, options.layers, options.mergekit, options.rows)
    finally:
        clear(folder)


def report(folder: Path, layers: int, mergekit_python: str | None, rows: Iterable[str]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make_inputs(folder, layers)
    size = (folder / "base" / "model.safetensors").stat().st_size / 1e9
    print(f"\nA model of Phi-1.5's shape, {layers} layers, bf16, {size:.2f} GB; files in memory.\n")
    print("| what | ours | the other side | ratio | ours: peak anonymous memory |\n|---|---|---|---|---|")
    notes = [ROWS[each](folder, layers, mergekit_python) for each in ROWS if each in rows]
    print("\n" + "\n".join(filter(None, notes)))


def adapter_rows(folder: Path, layers: int, mergekit_python: str | None) -> None:
    """The rows about rank-32 adapters."""
    base, out, merged = (folder / name for name in ("base", "out", "merged"))
    copies, ours = list[float](), list[dict[str, float]]()
    for _ in fresh(out, folder / "copy"):
        copies.append(command(["cp", "-r", str(base), str(folder / "copy")]))
        ours.append(run("adapter", base, folder / "adapter1", out)[0])
    adapter = quickest(ours)
    row(
        "rank-32 adapter, negated, into a checkpoint, against copying the checkpoint", adapter, min(copies), slower=True
    )
    row(
        "rank-32 adapter, negated, into a checkpoint, against PEFT",
        adapter,
        run("peft_merge", base, folder / "adapter1", out)[0],
    )
    clear(out)
    if mergekit_python:
        other = mergekit(mergekit_python, folder, f"{base}+{folder / 'adapter1'}", -1.0)
        row("the same, against mergekit `base+adapter`", adapter, other)
        clear(merged, folder / "cache")

    compressed = run("compress", folder / "adapter1", folder / "adapter2", out)[0]
    clear(out)
    few = 1
    svd = run("peft_svd", base, folder / "adapter1", folder / "adapter2", few)[0]
    row(
        f"two rank-32 adapters added, to rank 32, against PEFT `svd` ({few} layer, × {layers})",
        compressed,
        svd["seconds"] * layers / few,
    )


def live_rows(folder: Path, layers: int, mergekit_python: str | None) -> str:
    """The rows about live edits, and a note on expressions."""
    base, tuned = folder / "base", folder / "tuned"
    lives = [run("live", base, tuned) for _ in range(2)]
    reload, scaled, whole, one_pass = (quickest(each) for each in zip(*lives, strict=True))
    row("next λ (−0.4) on a live edit, against one pass over the weights", scaled, one_pass, slower=True)
    row("next λ (−1) on a live edit, against one pass over the weights", whole, one_pass, slower=True)
    row("next λ (−0.4) on a live edit, against loading the model again", scaled, reload)
    built = run("expression", base, tuned)[0]["seconds"]
    return f"An expression over ten vectors of this size is built in {built * 1000:.0f} ms; no tensor is read."


def dense_rows(folder: Path, layers: int, mergekit_python: str | None) -> str:
    """The rows about whole checkpoints; a note on rounding.

    All sides are taken in turns, and the best of each counts: the machine may be doing other things. What one wrote is
    removed before the next begins, so that all find the same memory free.
    """
    base, tuned, other, out, merged = (folder / name for name in ("base", "tuned", "other", "out", "merged"))
    files = {name: f"{folder / name}/*.safetensors" for name in ("base", "tuned", "other")}
    three = f"cat {files['base']} {files['tuned']} > /dev/null; cp -r {other} {folder}/copy"
    two = f"cat {files['tuned']} > /dev/null; cp -r {base} {folder}/copy"
    ways = {"θ + λτ on the vector's own base": (base, two), "θ' + λτ on another base": (other, three)}
    theirs: dict[float, list[dict[str, float]]] = {-0.6: [], -1.0: []}
    best: dict[float, dict[str, float]] = {}
    for what, (target, copying) in ways.items():
        copies: list[float] = []
        ours: dict[float, list[dict[str, float]]] = {-0.6: [], -1.0: []}
        for _ in range(3):
            for scale, found in ours.items():
                found.append(run("dense", base, tuned, target, out, scale)[0])
                clear(out)
                if mergekit_python and target == base and len(theirs[scale]) < 2:
                    theirs[scale].append(mergekit(mergekit_python, folder, str(tuned), scale))
                    clear(merged)
            copies.append(command(["sh", "-c", copying]))
            clear(folder / "copy")
        for scale, found in ours.items():
            name = f"{what}, λ = {scale:g}".replace("-", "−")
            row(f"{name}, against reading the inputs and writing one (`cat`, `cp`)", quickest(found), min(copies), True)
            if target == base:
                best[scale] = quickest(found)
    for scale, found in theirs.items():
        if found:
            row(
                f"own base, λ = {scale:g}, against mergekit `task_arithmetic`".replace("-", "−"),
                best[scale],
                quickest(found),
            )
    for scale in theirs if mergekit_python else ():
        whole_processes(folder, mergekit_python, scale)
    return rounding_note(folder, mergekit_python)


def whole_processes(folder: Path, mergekit_python: str, scale: float) -> None:
    """The same work as a user starts it, imports and all."""
    base, tuned, out = (folder / name for name in ("base", "tuned", "out"))
    code = "import sys; from hf_taskvec import TaskVector; b, t, o, s = sys.argv[1:]; "
    code += "TaskVector.from_finetuned(b, t).apply(b, o, scale=float(s))"
    arguments = [sys.executable, "-c", code, *map(str, (base, tuned, out, scale))]
    ours = {"seconds": min(command(arguments) for _ in fresh(out)), "memory": float("nan")}
    theirs = mergekit_process(folder, mergekit_python, scale)
    row(f"own base, λ = {scale:g}, whole processes, against `mergekit-yaml`".replace("= -", "= −"), ours, theirs)


def mergekit_process(folder: Path, mergekit_python: str, scale: float) -> float:
    """The seconds of mergekit's own command."""
    merged, config = folder / "merged", mergekit_config(folder, str(folder / "tuned"), scale)
    tool = [str(Path(mergekit_python).with_name("mergekit-yaml")), str(config), str(merged)]
    return min(command([*tool, "--allow-crimes", "--no-copy-tokenizer"]) for _ in fresh(merged, times=2))


def rounding_note(folder: Path, mergekit_python: str | None) -> str:
    base, tuned, other, out, merged = (folder / name for name in ("base", "tuned", "other", "out", "merged"))
    counts: dict[str, list[str]] = {"ours": [], "mergekit": []}
    for scale in (-1.0, -0.6):
        run("dense", base, tuned, base, out, scale)
        wrong, total = misrounded(out, base, base, {tuned: scale})
        counts["ours"].append(f"{wrong:,}")
        clear(out)
        if mergekit_python:
            mergekit(mergekit_python, folder, str(tuned), scale)
            counts["mergekit"].append(f"{misrounded(merged, base, base, {tuned: scale})[0]:,}")
            clear(merged)
    run("mixed", base, tuned, other, out)
    counts["ours"].append(f"{misrounded(out, other, base, {tuned: -0.7, other: 0.2})[0]:,}")
    clear(out)
    found = "; ".join(f"{side} {', '.join(each)}" for side, each in counts.items() if each)
    return f"Elements that differ from fp64 rounded once, of {total:,}, at λ = −1, −0.6, and −0.7 τ + 0.2 τ': {found}."


def saved_rows(folder: Path, layers: int, mergekit_python: str | None) -> str:
    """The rows about saved vectors, and a note on their bytes. Both sides in turns, the best of each.

    The last two rows are whole processes: what a user waits for, imports and all.
    """
    base, tuned, out, vector = (folder / name for name in ("base", "tuned", "out", "vector"))
    program = [sys.executable, "-m", "hf_taskvec"]
    extract = [*program, "extract", str(base), str(tuned), "-o", str(vector)]
    apply = [*program, "apply", str(vector), str(base), "--scale=-0.6", "-o", str(out)]
    writing = f"cat {base}/*.safetensors {tuned}/*.safetensors > /dev/null; cp -r {base} {folder}/copy"
    reading = f"cat {vector}/*.safetensors > /dev/null; cp -r {base} {folder}/copy"
    ours: dict[str, list[dict[str, float]]] = {"save": [], "load": [], "extract": [], "apply": []}
    copies: dict[str, list[float]] = {"write": [], "read": []}
    for _ in range(3):
        ours["save"].append(run("save", base, tuned, vector)[0])
        copies["write"].append(command(["sh", "-c", writing]))
        clear(folder / "copy")
        ours["load"].append(run("load", base, vector, out, -0.6)[0])
        clear(out)
        copies["read"].append(command(["sh", "-c", reading]))
        clear(folder / "copy", vector)
        ours["extract"].append({"seconds": command(extract), "memory": float("nan")})
        ours["apply"].append({"seconds": command(apply), "memory": float("nan")})
        size = sum(path.stat().st_size for path in vector.iterdir())
        clear(out, vector)
    best = {name: quickest(each) for name, each in ours.items()}
    write, read = (min(each) for each in copies.values())
    row("saving τ, against reading both and writing one (`cat`, `cp`)", best["save"], write, slower=True)
    row("loading τ, `base − 0.6 τ`, against reading both and writing one", best["load"], read, slower=True)
    row("`taskvec extract`, the whole process, against the same", best["extract"], write, slower=True)
    row("`taskvec apply` of the saved τ, the whole process", best["apply"], read, slower=True)
    if mergekit_python:
        both = {"seconds": best["extract"]["seconds"] + best["apply"]["seconds"], "memory": float("nan")}
        theirs = mergekit_process(folder, mergekit_python, -0.6)
        row("`taskvec extract` and `taskvec apply`, whole processes, against `mergekit-yaml`", both, theirs)
    return (
        f"The saved vector has {size / (tuned / 'model.safetensors').stat().st_size:.3f} × the bytes of the fine-tune."
    )


def start_rows(folder: Path, layers: int, mergekit_python: str | None) -> str:
    """The rows about starting: whole processes on a tiny model, whose config an earlier process has met."""
    from hf_taskvec.models.layout import layout_of_config

    tiny, out = folder / "tiny", folder / "out"
    config = {**CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512}
    shapes = layout_of_config(config).shapes
    make_model(tiny / "base", config, shapes, seed=0)
    make_model(tiny / "tuned", config, shapes, seed=1, base=tiny / "base")
    program = [sys.executable, "-m", "hf_taskvec"]
    extract = [*program, "extract", str(tiny / "base"), str(tiny / "tuned"), "-o", str(tiny / "vector")]
    apply = [*program, "apply", str(tiny / "vector"), str(tiny / "base"), "--scale=-0.6", "-o", str(out)]
    open_both = "from hf_taskvec import TaskVector; import sys; TaskVector.from_finetuned(*sys.argv[1:])"
    ways: dict[str, list[str]] = {
        "`taskvec extract` of a tiny model": extract,
        "`taskvec apply` of a tiny model": apply,
        "`from_finetuned` of two tiny folders": [sys.executable, "-c", open_both, *extract[4:6]],
    }
    command(extract)
    times: dict[str, list[float]] = {what: [] for what in ways}
    imports: list[float] = []
    for _ in range(5):
        for what, arguments in ways.items():
            clear(out, *([tiny / "vector"] if arguments is extract else []))
            times[what].append(command(arguments))
        imports.append(command([sys.executable, "-c", "import torch"]))
    for what, found in times.items():
        seconds = {"seconds": min(found), "memory": float("nan")}
        row(f"{what}, the whole process, against `import torch`", seconds, min(imports), slower=True)
    first, second = run("first", folder / "base", folder / "tuned")
    clear(tiny, out)
    return f"The first tile of a process takes {first['seconds']:.2f} s, the second {1000 * second['seconds']:.1f} ms."


def quickest(found: Iterable[dict[str, float]]) -> dict[str, float]:
    return min(found, key=lambda each: each["seconds"])


def fresh(*folders: Path, times: int = 3) -> Iterator[int]:
    """A few times, each without what the last one wrote."""
    for number in range(times):
        clear(*folders)
        yield number
    clear(*folders)


def many_rows(folder: Path, layers: int, mergekit_python: str | None) -> None:
    """A table of its own: one pass over 1, 2, 4 and 8 fine-tunes of a smaller model, in place of the others."""
    from hf_taskvec.models.layout import layout_of_config

    layers = max(1, layers // 6)
    config = {**CONFIG, "num_hidden_layers": layers}
    shapes = layout_of_config(config).shapes
    clear(folder)
    base, out = folder / "base", folder / "out"
    make_model(base, config, shapes, seed=0)
    tuned = [folder / f"tuned{number}" for number in range(8)]
    for number, each in enumerate(tuned):
        make_model(each, config, shapes, seed=100 + number, base=base)
    size = (base / "model.safetensors").stat().st_size / 1e9
    print(
        f"\n| vectors ({layers} layers, {size:.2f} GB each) | time | bytes read | peak anonymous memory |\n"
        "|---|---|---|---|"
    )
    for count in (1, 2, 4, 8):
        found = run("many", base, count, out, *tuned)[0]
        clear(out)
        print(
            f"| {count} | {found['seconds']:.2f} s | {size * (count + 1):.1f} GB | {found['memory']:.0f} MB |",
            flush=True,
        )


def row(what: str, ours: dict[str, float], other: dict[str, float] | float, slower: bool = False) -> None:
    seconds = other["seconds"] if isinstance(other, dict) else other
    ratio = f"{ours['seconds'] / seconds:.2f}× the time" if slower else f"{seconds / ours['seconds']:.1f}× faster"
    memory = "–" if math.isnan(ours["memory"]) else f"{ours['memory']:.0f} MB"
    print(f"| {what} | {ours['seconds']:.2f} s | {seconds:.1f} s | {ratio} | {memory} |", flush=True)


#: groups of rows, in the order in which they are measured; each may give a note
ROWS: dict[str, Callable[[Path, int, str | None], str | None]] = {
    "dense": dense_rows,
    "saved": saved_rows,
    "adapter": adapter_rows,
    "live": live_rows,
    "start": start_rows,
    "many": many_rows,
}


if __name__ == "__main__":
    main()
