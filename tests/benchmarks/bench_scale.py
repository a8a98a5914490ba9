"""What task vectors cost as something grows: the tables of docs/scale.md, each made in one run.

    python tests/benchmarks/bench_scale.py                           # all tables
    python tests/benchmarks/bench_scale.py --rows vectors opening    # some of them
    python tests/benchmarks/bench_scale.py --rows hub --layers 12    # a larger checkpoint

The models are random ones of Phi-1.5's width in bf16. Every job runs in processes of its own, with one thread, which
also watch their own anonymous memory: what mapped files take of the page cache is nobody's. The seconds to compare are
the processor's; the clock's hang on what else the machine does.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[each]) for each in (0, 1, 2)]

from bench_apply import CONFIG, anonymous, make_model  # noqa: E402

LAYERS, VECTORS, OPENED, FILES = (1, 4, 8), (1, 2, 4, 8, 16), (10, 100, 1000), (1, 4, 16, 64)
BOOKS, RANKS = (1, 2, 4, 8), (1, 2, 4)
RANK = 16
MATRICES, MATRIX = 24, (2048, 4096)  # of the live model that is sharded


# The jobs: each prints a line of JSON.


@contextmanager
def measured(**more: Callable[[], float]) -> Iterator[dict[str, float]]:
    """Seconds, those of the processor, the peak of anonymous memory above the start in MB, and of whatever else."""
    from hf_taskvec.peak_memory import give_back_memory

    give_back_memory()  # else what was freed before would be used again, and not be seen
    start, over = anonymous(), threading.Event()
    found = dict.fromkeys(("memory", *more), 0.0)

    def watch() -> None:
        while not over.wait(0.01):
            found["memory"] = max(found["memory"], (anonymous() - start) / 1024)
            for name, measure in more.items():
                found[name] = max(found[name], measure())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    began, began_cpu = time.perf_counter(), time.process_time()
    yield found
    found |= {"seconds": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
    over.set()
    thread.join()


def job_apply(base: str, output: str, threads: str, *vectors: str) -> dict[str, float]:
    """A sum of fine-tunes (folders with a config), or of saved vectors."""
    import hf_taskvec.application.to_checkpoint  # noqa: F401
    from hf_taskvec import TaskVector

    def opened(where: str) -> TaskVector:
        is_model = (Path(where) / "config.json").exists()
        return TaskVector.from_finetuned(base, where) if is_model else TaskVector.load(where)

    opened(vectors[0]).apply(base, f"{output}-first", scale=-0.1, threads=1)  # the layout is known, and code compiled
    shutil.rmtree(f"{output}-first")
    with measured() as found:
        whole = sum(opened(each) for each in vectors)
        whole.apply(base, output, scale=-0.1, threads=int(threads))
    return found


def job_open(base: str, output: str, folder: str, count: str) -> dict[str, float]:
    import hf_taskvec.application.to_checkpoint  # noqa: F401
    from hf_taskvec import TaskVector, combine

    names = sorted(Path(folder).iterdir())[: int(count)]
    TaskVector.load(names[0]).apply(base, f"{output}-first", scale=-0.1, threads=1)
    shutil.rmtree(f"{output}-first")
    with measured() as opening:
        vectors = [TaskVector.load(each) for each in names]
    with measured() as adding:
        sum(vectors[1:], vectors[0])
    with measured() as combining:
        whole = combine(vectors, "sum")
    with measured() as applying:
        whole.apply(base, output, scale=-0.1, threads=1)
    return (
        opening
        | {"+": adding["cpu"], "combine": combining["cpu"], "apply": applying["cpu"]}
        | {"held": applying["memory"]}
    )


def job_sweep(model: str, vector: str, count: str) -> dict[str, float]:
    import datasets
    from support.tiny_books import STORY, make_tokenizer
    from transformers import AutoModelForCausalLM

    from hf_taskvec import TaskVector
    from hf_taskvec.evaluation import load_book, protocols, sweep

    books = []
    for number in range(int(count)):
        text = STORY.replace("lamps", f"things{number}").replace("room", f"house {number} room")
        book = datasets.Dataset.from_dict({"text": [text]})
        books.append(load_book(book, f"book{number}", role="retain" if number else "forget", block_words=300))
    protocol = protocols.get(prompt_length=14, answer_length=16, samples=16)
    live, loaded = AutoModelForCausalLM.from_pretrained(model), TaskVector.load(vector)
    with measured() as found:
        sweep(live, loaded, (0, -0.5, -1), books, protocol, tokenizer=make_tokenizer(), resamples=200, permutations=200)
    return found


def job_rank(kind: str, dimension: str, meeting: str) -> dict[str, float]:
    """One process of those that share a model; alone, a model that nobody shares."""
    import torch

    from hf_taskvec import TaskVector

    size = int(os.environ.get("WORLD_SIZE", "1"))
    draw = torch.Generator().manual_seed(0)
    names = [f"w{number}" for number in range(MATRICES)]
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.randn(MATRIX, generator=draw).bfloat16() * 0.02) for name in names}
    )
    if kind == "dense":
        change = torch.randn(MATRIX, generator=draw).bfloat16() * 0.001
        vector = TaskVector.from_tensors(dict.fromkeys(names, change))
    else:
        factors = [torch.randn(shape, generator=draw) * 0.02 for shape in ((MATRIX[0], RANK), (RANK, MATRIX[1]))]
        vector = TaskVector.from_tensors({name: tuple(factors) for name in names})
    if size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=size
        )
        mesh, place = init_device_mesh("cpu", (size,)), [Shard(int(dimension))]
        for name in names:
            model[name] = torch.nn.Parameter(distribute_tensor(model[name].data, mesh, place))
    small = torch.nn.ParameterDict({names[0]: torch.nn.Parameter(torch.zeros(MATRIX).bfloat16())})
    vector.filter(include=names[0]).edit(small, -0.6).restore()  # the code is compiled
    with measured() as found:
        edit = vector.edit(model, -0.6)
    with measured() as moved:
        edit.set_scale(-0.8)
    edit.restore()
    return found | {"next": moved["cpu"]}


def job_hub(work: str) -> dict[str, float]:
    """From a Hub to itself; the Hub is another process."""
    import hf_taskvec.application.to_checkpoint
    import hf_taskvec.publishing.push_without_folder  # noqa: F401
    from hf_taskvec import TaskVector

    def disk() -> float:
        """MB of the work folder, and of the tensors that are mapped from files without a name."""
        held = sum(each.stat().st_blocks * 512 for each in Path(work).rglob("*") if each.is_file())
        files = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            if re.search(r"/taskvec-\w{8} \(deleted\)$", line):
                start, stop = (int(each, 16) for each in line.split()[0].split("-"))
                files[line.split()[4]] = files.get(line.split()[4], 0) + stop - start
        return (held + sum(files.values())) / 1e6

    vector = TaskVector.from_finetuned("me/base", "me/tuned", stream=True)
    Path(work).mkdir()
    with measured(disk=disk) as found:
        vector.apply("me/base", push_to="me/merged", scale=-0.6, work_folder=work, threads=2)
    return found


def serve_hub(base: str, tuned: str) -> None:
    from support.hub_server import HubServer

    with HubServer() as hub:
        hub.add_repo("me/base", Path(base))
        hub.add_repo("me/tuned", Path(tuned))
        print(json.dumps(hub.environment()), flush=True)
        sys.stdin.read()  # until whoever started it is done


JOBS = {each.__name__: each for each in (job_apply, job_open, job_sweep, job_rank, job_hub)}


def run(job: Callable[..., dict[str, float]], *arguments: object, **environment: str) -> dict[str, float]:
    return start(job, *arguments, **environment)()


def start(
    job: Callable[..., dict[str, float]], *arguments: object, **environment: str
) -> Callable[[], dict[str, float]]:
    line = [sys.executable, __file__, "--job", job.__name__, *map(str, arguments)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(line, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish() -> dict[str, float]:
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"{' '.join(line)}\n{err[-3000:]}")
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        say(f"{job.__name__} {' '.join(map(str, arguments))[-60:]}: " + str({k: round(v, 3) for k, v in found.items()}))
        return found

    return finish


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def table(title: str, *columns: str) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


# The tables.


def make_models(folder: Path, layers: int, count: int) -> float:
    """A base and so many fine-tunes of it; how many GB each has."""
    from hf_taskvec.models.layout import layout_of_config

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = {**CONFIG, "num_hidden_layers": layers, "vocab_size": 2048}
    shapes = layout_of_config(config).shapes
    for number in range(count + 1):
        path = folder / (f"tuned{number}" if number else "base")
        if not path.exists():
            say(f"making {path.name}")
            make_model(path, config, shapes, number, folder / "base" if number else None)
    return (folder / "base" / "model.safetensors").stat().st_size / 1e9


def make_vector(output: Path, base: Path, seed: int, rank: int = RANK, only: int | None = None) -> Path:
    """A saved vector of factors for the matrices of a base, or for some of them."""
    import torch

    from hf_taskvec import TaskVector
    from hf_taskvec.models.checkpoint import open_checkpoint

    draw = torch.Generator().manual_seed(seed)
    shapes = {n: each.shape for n, each in open_checkpoint(base).tensors.items() if len(each.shape) == 2}
    factors = {
        name: (torch.randn(rows, rank, generator=draw) * 0.02, torch.randn(rank, columns, generator=draw) * 0.02)
        for name, (rows, columns) in list(shapes.items())[:only]
    }
    return TaskVector.from_tensors(factors, name=f"v{seed}").save(output, progress=False)


def by_parameters(folder: Path, layers: int) -> None:
    names = (f"{kind}: {what}" for kind in ("full", "LoRA") for what in ("processor seconds", "a GB", "memory (MB)"))
    table(f"One vector (LoRA: rank {RANK}), λ = −0.1; one file, one thread.", "parameters (million)", "GB", *names)
    for count in LAYERS:
        home = folder / f"{count}-layers"
        size = make_models(home, count, 1)
        cells: list[str] = []
        for vector in (home / "tuned1", make_vector(home / "adapter", home / "base", 1)):
            found = run(job_apply, home / "base", home / "out", 1, vector)
            shutil.rmtree(home / "out")
            cells += [f"{found['cpu']:.2f}", f"{found['cpu'] / size:.2f}", f"{found['memory']:.0f}"]
        shutil.rmtree(home)
        row(f"{size * 500:.0f}", f"{size:.2f}", *cells)


def by_vectors(folder: Path, layers: int) -> None:
    size = make_models(folder, max(1, layers // 2), VECTORS[-1])
    adapters = [make_vector(folder / f"adapter{n}", folder / "base", n) for n in range(1, VECTORS[-1] + 1)]
    kinds = {
        "full fine-tunes": [folder / f"tuned{n}" for n in range(1, VECTORS[-1] + 1)],
        f"LoRA, rank {RANK}": adapters,
    }
    names = (f"{kind}: {what}" for kind in kinds for what in ("processor seconds", "beside one vector", "memory (MB)"))
    table(f"Vectors in one sum, λ = −0.1; a base of {size:.2f} GB, one thread.", "vectors", *names)
    first: dict[str, float] = {}
    for count in VECTORS:
        cells: list[str] = []
        for kind, vectors in kinds.items():
            found = run(job_apply, folder / "base", folder / "out", 1, *vectors[:count])
            shutil.rmtree(folder / "out")
            ratio = found["cpu"] / first.setdefault(kind, found["cpu"])
            cells += [f"{found['cpu']:.2f}", f"{ratio:.2f}×", f"{found['memory']:.0f}"]
        row(count, *cells)


def by_opening(folder: Path, layers: int) -> None:
    make_models(folder / "one", 1, 0)
    base, saved = folder / "one" / "base", folder / "saved"
    say(f"saving {OPENED[-1]} vectors")
    for number in range(OPENED[-1]):
        make_vector(saved / f"{number:05}", base, number, rank=1, only=4)
    table(
        "Saved vectors, each of rank 1 on four matrices, opened, added up and applied in one pass: processor seconds.",
        *("vectors", "opening", "memory (MB)", "`a + b + …`", '`combine(…, "sum")`', "apply", "memory (MB)"),
    )
    for count in OPENED:
        found = run(job_open, base, folder / "out", saved, count)
        shutil.rmtree(folder / "out")
        times = (f"{found[each]:.2f}" for each in ("+", "combine", "apply"))
        row(count, f"{found['cpu']:.2f}", f"{found['memory']:.0f}", *times, f"{found['held']:.0f}")


def by_shards(folder: Path, layers: int) -> None:
    from hf_taskvec import TaskVector

    size = make_models(folder, layers, 1)
    vector = TaskVector.from_finetuned(folder / "base", folder / "tuned1")
    table(
        f"The same {size:.2f} GB in more files; base, fine-tune and output alike; one thread.",
        *("files", "processor seconds", "beside one file", "memory (MB)"),
    )
    first = None
    for count in FILES:
        limit = int(size * 1e9 / count * (1.04 if count < 32 else 1.2)) if count > 1 else int(2e9)
        for name, scale in (("cut-base", 0.0), ("cut-tuned", 1.0)):
            shutil.rmtree(folder / name, ignore_errors=True)
            vector.apply(folder / "base", folder / name, scale=scale, max_shard_size=limit, progress=False)
        found = run(job_apply, folder / "cut-base", folder / "out", 1, folder / "cut-tuned")
        files = len(list((folder / "out").glob("*.safetensors")))
        shutil.rmtree(folder / "out")
        first = first or found["cpu"]
        row(files, f"{found['cpu']:.2f}", f"{found['cpu'] / first:.2f}×", f"{found['memory']:.0f}")


def by_books(folder: Path, layers: int) -> None:
    from support.tiny_books import make_tokenizer, tiny_llama

    tiny_llama().save_pretrained(folder / "tiny")
    make_tokenizer().save_pretrained(folder / "tiny")
    vector = make_vector(folder / "tiny-vector", folder / "tiny", 1, rank=2)
    table(
        "A sweep of a tiny model (16 passages a book, 16 words an answer, 3 λ); the first book is to be forgotten.",
        *("books", "processor seconds", "beside one book", "memory (MB)"),
    )
    first = None
    for count in BOOKS:
        found = run(job_sweep, folder / "tiny", vector, count)
        first = first or found["cpu"]
        row(count, f"{found['cpu']:.1f}", f"{found['cpu'] / first:.2f}×", f"{found['memory']:.0f}")


def by_ranks(folder: Path, layers: int) -> None:
    folder.mkdir()
    share = MATRICES * MATRIX[0] * MATRIX[1] * 2 / 2**20
    table(
        f"One edit of {MATRICES} bf16 matrices of {MATRIX[0]} × {MATRIX[1]} ({share:.0f} MiB), one thread a process.",
        *("processes", "split by", "vector", "share (MiB)", "memory added (MiB)", "processor seconds: edit", "next λ"),
    )
    for kind in ("dense", "low-rank"):
        for dimension, word in ((0, "rows"), (1, "columns")):
            for count in RANKS:
                if count == 1 and dimension:
                    continue
                started = [
                    start(
                        job_rank,
                        kind,
                        dimension,
                        folder / f"{kind}{dimension}{count}",
                        RANK=str(n),
                        WORLD_SIZE=str(count),
                    )
                    for n in range(count)
                ]
                every = [finish() for finish in started]
                word = "–" if count == 1 else ("rows", "columns")[dimension]
                kind_word = kind if kind == "dense" else f"rank {RANK}"
                row(count, word, kind_word, f"{share / count:.0f}", *(_range(every, each) for each in _SHOWN))


_SHOWN = {"memory": ".0f", "cpu": ".2f", "next": ".2f"}


def _range(every: list[dict[str, float]], name: str) -> str:
    values = sorted(format(each[name], _SHOWN[name]) for each in every)
    return values[0] if values[0] == values[-1] else f"{values[0]}–{values[-1]}"


def by_hub(folder: Path, layers: int) -> None:
    from hf_taskvec import TaskVector

    size = make_models(folder, layers, 1)
    vector = TaskVector.from_finetuned(folder / "base", folder / "tuned1")
    for name, scale in (("cut-base", 0.0), ("cut-tuned", 1.0)):
        shutil.rmtree(folder / name, ignore_errors=True)
        vector.apply(folder / "base", folder / name, scale=scale, max_shard_size=int(size * 1e9 / 5), progress=False)
    shards = sorted(each.stat().st_size for each in (folder / "cut-base").glob("*.safetensors"))
    line = [sys.executable, __file__, "--serve", str(folder / "cut-base"), str(folder / "cut-tuned")]
    server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        environment = json.loads(server.stdout.readline())
        found = run(job_hub, folder / "work", **environment)
    finally:
        server.communicate("")
    table(
        f"Hub to Hub over loopback, base and fine-tune of {size:.2f} GB in {len(shards)} shards of at most "
        f"{shards[-1] / 1e6:.0f} MB.",
        *("seconds", "processor seconds", "memory (MB)", "disk (MB)"),
    )
    row(*(f"{found[each]:.0f}" for each in ("seconds", "cpu", "memory", "disk")))


ROWS = {
    "parameters": by_parameters,
    "vectors": by_vectors,
    "opening": by_opening,
    "shards": by_shards,
    "books": by_books,
    "ranks": by_ranks,
    "hub": by_hub,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], help="which tables; all by default")
    parser.add_argument("--layers", type=int, default=4, help="of the models; each layer has 100 MB (default: 4)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files go for a while")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_hub(*options.serve)
        return
    if options.job:
        name, *arguments = options.job
        print(json.dumps(JOBS[name](*arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="taskvec-bench-", dir=options.folder) as folder:
        for name in options.rows:
            say(f"table: {name}")
            ROWS[name](Path(folder) / name, options.layers)
            shutil.rmtree(Path(folder) / name, ignore_errors=True)


if __name__ == "__main__":
    main()
