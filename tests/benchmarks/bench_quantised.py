"""Applying a vector to models of fewer bits: time beside a copy, and the most memory. The table of docs/benchmarks.md.

    python tests/benchmarks/bench_quantised.py [--folder FOLDER] [--layers 4] [--threads 2]

Random weights in FP8 (a Llama's layers of width 2,048, blocks of 128 x 128) and MXFP4 (gpt-oss's experts of width
2,880, eight in a layer), and a fine-tune of each in bf16. Each job runs in a process of its own, which watches its
anonymous memory. Times are those of the job alone, without imports. The files should lie in memory (/dev/shm), or in
the cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 1024,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
JOBS = ("copy", "bf16", "same")


def make(folder: Path, kind: str, layers: int) -> None:
    """A base in fewer bits and its fine-tune in bf16."""
    from hf_taskvec.models.checkpoint import open_checkpoint
    from hf_taskvec.models.layout import layout_of_config

    config = {**(_LLAMA if kind == "fp8" else _GPT_OSS), "num_hidden_layers": layers, "dtype": "bfloat16"}
    generator = torch.Generator().manual_seed(0)
    base: dict[str, torch.Tensor] = {}
    for name, shape in layout_of_config(config).shapes.items():
        if kind == "fp8" and len(shape) == 2 and ".layers." in name:
            codes = torch.randint(0, 0x70, shape, generator=generator, dtype=torch.uint8)
            base[name] = codes.view(torch.float8_e4m3fn)
            base[f"{name}_scale_inv"] = torch.full([-(-each // 128) for each in shape], 1e-3)
        elif kind == "mxfp4" and len(shape) == 3:
            experts, inputs, outputs = shape
            size = (experts, outputs, inputs // 32)
            base[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
            base[f"{name}_scales"] = torch.randint(118, 122, size, generator=generator, dtype=torch.uint8)
        else:
            base[name] = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
    for each in ("base", "tuned"):
        (folder / each).mkdir(parents=True)
    method = {"quant_method": kind, **({"weight_block_size": [128, 128]} if kind == "fp8" else {})}
    save_file(base, folder / "base" / "model.safetensors", {"format": "pt"})
    (folder / "base" / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    tuned = {}
    for name, source in open_checkpoint(folder / "base").tensors.items():
        weight = source.read()
        tuned[name] = weight + (torch.randn(1 << 20, generator=generator) * 2e-3).repeat(-(-weight.numel() >> 20) + 1)[
            : weight.numel()
        ].view(weight.shape).to(weight.dtype)
    save_file(tuned, folder / "tuned" / "model.safetensors", {"format": "pt"})
    (folder / "tuned" / "config.json").write_text(json.dumps(config))


def work(job: str, folder: Path, threads: int) -> dict[str, Any]:
    """Do one job in this process: seconds, and the peak of what it took."""
    from hf_taskvec import TaskVector

    torch.set_num_threads(1)
    output = folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    vector = TaskVector.from_finetuned(folder / "base", folder / "tuned")
    before, peak, done = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.003):
            peak[0] = max(peak[0], _anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu = time.perf_counter(), time.process_time()
    if job == "copy":
        shutil.copytree(folder / "base", output)
    else:
        vector.apply(folder / "base", output, scale=-0.5, requantise=job, threads=threads)
    taken = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    watcher.join()
    size = sum(file.stat().st_size for file in output.iterdir())
    return {"seconds": taken[0], "cpu": taken[1], "peak": peak[0], "written": size}


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/bench-quantised"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(work(options.job[0], options.folder / options.job[1], options.threads)))
        return
    print("| format | base | job | written | CPU time | wall time | peak memory |\n|---|---|---|---|---|---|---|")
    for kind in ("fp8", "mxfp4"):
        make(options.folder / kind, kind, options.layers if kind == "fp8" else max(1, options.layers // 4))
        base = (options.folder / kind / "base" / "model.safetensors").stat().st_size
        for job in JOBS:
            command = [sys.executable, __file__, "--folder", str(options.folder), "--threads", str(options.threads)]
            run = subprocess.run([*command, "--job", job, kind], check=True, capture_output=True, text=True)
            found = json.loads(run.stdout.splitlines()[-1])
            sizes = [f"{found[each] / 1e6:.0f} MB" for each in ("written", "peak")]
            times = [f"{found[each]:.1f} s" for each in ("cpu", "seconds")]
            print(
                f"| {kind} | {base / 1e6:.0f} MB | {job} | {sizes[0]} | {' | '.join(times)} | {sizes[1]} |", flush=True
            )
        shutil.rmtree(options.folder / kind)


if __name__ == "__main__":
    main()
