"""A small audit for `accelerate launch`: launched_audit.py OUTPUT; each process writes the report that it got.

Trains nothing before and reads nothing: the same untrained models in every process, from their seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.launch import leave_processes
from support.tiny_books import make_books, make_tokenizer, tiny_llama

from hf_taskvec.auditing import Relearning, audit
from hf_taskvec.distributed import processes
from hf_taskvec.evaluation import Criteria, protocols


def main(output: Path) -> None:
    report = audit(
        tiny_llama(),
        tiny_llama(seed=1),
        make_books()[:1],
        protocols.get(prompt_length=12, answer_length=6),
        reference=tiny_llama(seed=2),
        attacks=["relearn", "sample", "prompt"],
        tokenizer=make_tokenizer(),
        criteria=Criteria(membership=0.5),  # the models know nothing, whatever a few passages say
        passages=4,
        relearning=Relearning(learning_rate=1e-3, steps=2, points=1, batch_size=2, block_length=32, rank=4),
        samples=2,
        output=output,
        batch_size=4,
        resamples=100,
    )
    (output / f"process-{processes().process_index}.json").write_text(json.dumps(report.to_dict()))
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
