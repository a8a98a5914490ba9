"""A small `forget` for `accelerate launch`: launched_forget.py WORLD OUTPUT."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from support.forgetting_world import MENDING, World
from support.launch import leave_processes
from support.memorised_books import make_books_and_tokenizer

from hf_taskvec import TaskVector, forget


def main(world: Path, output: Path) -> None:
    tokenizer, books = make_books_and_tokenizer()
    given = World(world / "joint", world / "base", world / "reference", books, tokenizer)
    vector = TaskVector.from_finetuned(given.base, given.joint, name="forget")
    quick = replace(MENDING, epochs=2)
    forget(**given.arguments(vector=vector, rounds=1, repairing=quick), output=output, write_anyway=True)
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
