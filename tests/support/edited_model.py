"""A base, a fine-tune, two books and a swept edit of them: what cards, pushes and commands are tested with."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from support import tiny_models
from support.tiny_books import STORY, make_tokenizer, tiny_llama

from hf_taskvec import TaskVector
from hf_taskvec.evaluation import UnlearningReport, load_book, protocols, sweep

CARD = "---\nlicense: mit\ndatasets:\n- me/stories\n---\n# The base\n"
OTHER = STORY.replace("lamps", "boats").replace("tells of", "counts all").replace("room", "harbour")
SCALES = (0.0, -0.5, -1.0)


class Edited:
    """Folders `base` and `tuned` with a tokenizer, books as text files, and the report of a real sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        base = tiny_llama(context=256)
        self.pair = tiny_models.save_pair(folder, base, tiny_models.tuned_copy(base, 0.02))
        for path in (self.pair.base, self.pair.tuned):
            make_tokenizer().save_pretrained(path)
        (self.pair.base / "README.md").write_text(CARD)
        self.lamps, self.boats = folder / "lamps.txt", folder / "boats.txt"
        self.lamps.write_text(STORY)
        self.boats.write_text(OTHER)

    @cached_property
    def vector(self) -> TaskVector:
        self.saved  # noqa: B018 (the sweep is of the saved vector, as a user's would be)
        return TaskVector.load(self.saved)

    @cached_property
    def saved(self) -> Path:
        self.pair.vector().save(self.folder / "vector")
        return self.folder / "vector"

    @cached_property
    def report(self) -> UnlearningReport:
        return self._swept(self.vector, SCALES)

    @cached_property
    def report_of_edits(self) -> UnlearningReport:
        return self._swept({"half of it": -0.5 * self.vector, "all of it": -1 * self.vector}, None)

    def _swept(self, change: Any, scales: Any) -> UnlearningReport:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(self.pair.base, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(self.pair.base)
        books = [
            load_book(self.lamps, role="forget", block_words=300),
            load_book(self.boats, role="retain", block_words=300),
        ]
        protocol = protocols.get(samples=4, prompt_length=20, answer_length=6)
        return sweep(model, change, scales, books, protocol, tokenizer=tokenizer, resamples=100, permutations=100)
