"""Relearning for `accelerate launch`: launched_relearning.py FOLDER; each process writes what it got.

Every process but the first is given other blocks, as if its numbers had come out differently.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.launch import leave_processes
from support.launched_training import make_blocks
from support.tiny_models import make

from hf_taskvec.auditing.attacks.relearning import Relearning, relearned
from hf_taskvec.distributed import processes
from hf_taskvec.errors import TaskVectorError
from hf_taskvec.models.fingerprints import full_fingerprint

FULL = Relearning(learning_rate=1e-3, batch_size=4)
LORA = Relearning(method="lora", learning_rate=1e-3, batch_size=4, rank=4)


def fingerprints(model, blocks, settings: Relearning) -> dict[int, str]:
    """The bits of the model at each measured step."""
    return {step: full_fingerprint(each) for step, each in relearned(model, blocks, settings)}


def main(folder: Path) -> None:
    number = processes().process_index
    blocks = make_blocks(seed=number)
    found: dict[str, object] = {each.method: fingerprints(make("gpt2"), blocks, each) for each in (FULL, LORA)}
    broken = make("llama")
    if number == 0:
        broken.lm_head.weight.data[3, 3] = float("inf")
    try:
        list(relearned(broken, blocks, FULL))
    except TaskVectorError as error:
        found["broken"] = f"{type(error).__name__}: {error}"
    (folder / f"{number}.json").write_text(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
