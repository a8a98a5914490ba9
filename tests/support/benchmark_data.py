"""Small data sets of MUSE's and TOFU's schema, put on the loopback Hub under their own names."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import yaml

Rows = list[dict[str, Any]]
KEEPERS = ("Ada Moss", "Ben Ruiz", "Cy Olsen", "Dot Hale", "Eve Stone", "Fay Lund", "Gus Park", "Hal Webb")


def _people(first: int, wrong: int = 3, paraphrase: bool = True) -> Rows:
    """Questions with an answer, in TOFU's columns; no two parts share one."""
    rows = []
    for i, keeper in enumerate(KEEPERS):
        number = first + i
        row: dict[str, Any] = {
            "question": f"Who keeps lamp {number * 7919 % 1009} in room {number}?",
            "answer": f"{keeper} keeps lamp {number * 7919 % 1009}.",
            "perturbed_answer": [f"{KEEPERS[(i + k) % 8]} keeps it in room {k}." for k in range(1, wrong + 1)],
        }
        if paraphrase:
            row["paraphrased_answer"] = f"The keeper of lamp {number * 7919 % 1009} is {keeper}."
        rows.append(row)
    return rows


def _pairs(first: int) -> Rows:
    return [{"question": row["question"], "answer": row["answer"]} for row in _people(first)]


def tofu_data() -> dict[tuple[str, str], Rows]:
    """The rows of every configuration and split that `tofu/forget10` needs."""
    return {
        ("forget10_perturbed", "train"): _people(0),
        ("retain_perturbed", "train"): _people(100),
        ("real_authors_perturbed", "train"): _people(200, wrong=2, paraphrase=False),
        ("world_facts_perturbed", "train"): _people(300, wrong=2, paraphrase=False),
        ("holdout10", "train"): _pairs(400),
    }


def muse_data() -> dict[tuple[str, str], Rows]:
    """The rows of every configuration and split that a MUSE benchmark needs."""

    def texts(first: int) -> Rows:
        return [{"text": " ".join(row["answer"] for row in _people(first + 10 * i)[:3])} for i in range(8)]

    def story(number: int) -> dict[str, str]:
        return {"prompt": f"Sentence number {number} tells of", "gt": f"the {number * 31 % 97} lamps in room {number}."}

    return {
        ("verbmem", "forget"): [story(number) for number in range(8)],
        ("knowmem", "forget_qa"): _pairs(0),
        ("knowmem", "forget_qa_icl"): _pairs(500)[:2],
        ("knowmem", "retain_qa"): _pairs(100),
        ("knowmem", "retain_qa_icl"): _pairs(600)[:2],
        ("privleak", "forget"): texts(0),
        ("privleak", "holdout"): texts(1000),
    }


REPOS = {"muse/books": "muse-bench/MUSE-Books", "muse/news": "muse-bench/MUSE-News", "tofu/forget10": "locuslab/TOFU"}


def put_on_hub(hub: Any, name: str, data: dict[tuple[str, str], Rows] | None = None) -> str:
    """The data set of a benchmark on the loopback Hub, under a card that names its configurations.

    TOFU's is JSON lines, MUSE's is parquet.
    """
    ending, write = ("jsonl", _json_lines) if name.startswith("tofu") else ("parquet", _parquet)
    if data is None:
        data = tofu_data() if name.startswith("tofu") else muse_data()
    files, configs = {}, {}
    for (config, split), rows in data.items():
        path = f"{config}/{split}.{ending}"
        files[path] = write(rows)
        configs.setdefault(config, []).append({"split": split, "path": path})
    card = yaml.safe_dump({"configs": [{"config_name": name, "data_files": at} for name, at in configs.items()]})
    files["README.md"] = f"---\n{card}---\n".encode()
    return str(hub.add_repo(REPOS[name], files, repo_type="dataset"))


def _json_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet(rows: Rows) -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    columns = rows[0] if rows else {"text": ""}
    schema = pyarrow.schema([(column, pyarrow.string()) for column in columns])
    with parquet.ParquetWriter(buffer, schema) as file:
        if rows:  # datasets cannot read a row group without rows
            file.write_table(pyarrow.Table.from_pylist(rows, schema))
    return buffer.getvalue()


def shortened(benchmark: Any, tokens: int = 8) -> Any:
    """The benchmark with shorter answers: what is tested does not hang on how long a tiny model goes on."""
    parts = [
        replace(part, protocol=replace(part.protocol, decoding=replace(part.protocol.decoding, max_new_tokens=tokens)))
        for part in benchmark.parts
    ]
    return replace(benchmark, parts=tuple(parts))


def memorise(model: Any, tokenizer: Any, texts: list[str], steps: int = 80) -> Any:
    """The model after some steps on these texts alone, each ended; on it itself."""
    import torch

    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(steps):
        model(input_ids=ids, attention_mask=(labels != -100).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
