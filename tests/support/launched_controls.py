"""The controls of an edit for `accelerate launch`: launched_controls.py OUTPUT STORE.

Trains nothing: the same weights in every process, from seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.launch import leave_processes
from support.tiny_books import make_books, make_tokenizer, tiny_llama

from hf_taskvec import TaskVector
from hf_taskvec.distributed import processes
from hf_taskvec.evaluation import protocols, run_controls


def main(output: str, store: str) -> None:
    base = tiny_llama()
    vectors = [TaskVector.from_finetuned(base, tiny_llama(seed=seed), name=f"v{seed}") for seed in (1, 2)]
    table = run_controls(
        base,
        vectors[0],
        -0.5,
        make_books(),
        protocols.get(prompt_length=14, answer_length=6, samples=6),
        others={"boats": vectors[1]},
        tokenizer=make_tokenizer(),
        store=store,
        batch_size=3,
        resamples=100,
    )
    if processes().is_main_process:
        Path(output).write_text(json.dumps(table.to_dict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
    if processes().num_processes > 1:
        leave_processes()
