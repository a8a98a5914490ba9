"""Edits that really forget, over pairs of books and seeds: the tables of docs/results.md.

    python tests/benchmarks/seeds_forget.py --model FOLDER_OF_STORIES15M \\
        --books oz=wizard.txt,land.txt,pride.txt alice=alice.txt,glass.txt,pride.txt [--seeds 30 31 32 33 34]
    python tests/benchmarks/seeds_forget.py ... --shares 0.1 0.25 0.5   # repaired on less of the kept text
    python tests/benchmarks/seeds_forget.py ... --only-table            # what there is so far

Each case is a book to forget, its sequel or prequel, and an unrelated one, 1,650 seen words each (of the first as many
held out for the membership test), and a seed: of the training, the split and the order. θ_0' is θ_0 fine-tuned on all
three, the reference θ_0 fine-tuned on the two to keep, and every edit is judged beside it. Tried are

- `negate`: −λτ at the λ where the book's loss is that of the reference;
- `project`: −λτ⊥ + 0.5 (τ_aligned + τ_retain) at that λ;
- `repair`: a negation beyond chance, then a fine-tune on the two books to keep for half of a retraining's epochs; where
  that does not qualify, a second try that the verdict sets (`hf_taskvec.forgetting`), usually of more epochs;
- `project, repair`: the same from the projected edit;
- `lora, repair` and `lora, full repair` (with `--ways lora`): the same from a LoRA vector of rank 32;
- `brief retraining`: θ_0 fine-tuned on the two books for as long as one repair: what the repair's budget buys without
  any vector.

What was fixed before the reported seeds (30 to 34) were run, after seeds below 30: all settings in this file, and the
goal for a case: R of Rouge-L, loss, extraction strength and exact memorisation within 0.8 and 1.2, the membership AUC
within 0.05 of the reference's, and no more than 5 % lost by a kept book in any of the four, as means over the half of
the passages that did not choose the edit; the first repair costs half of a retraining. Reported is every case, whatever
it says. Expected, after two such cases: that `negate` and `project` never get there; that the first `repair` gets the
four R there in nearly every case, and the kept books to within 5 % in few (they lost 18 and 19 %), the second in more;
that the membership AUC is above the reference's by 0.05 to 0.15, and that half of the passages (33 seen ones against as
many unseen) measure it to ± 0.1 only; that `brief retraining` forgets and keeps much less.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_taskvec import TaskVector
from hf_taskvec.evaluation import Criteria, UnlearningReport, protocols, sweep
from hf_taskvec.evaluation.reporting.rechoosing import verdicts_by_scale
from hf_taskvec.evaluation.reporting.verdict_tables import markdown_table
from hf_taskvec.evaluation.scoring.metrics import PRIMARY
from hf_taskvec.evaluation.scoring.verdict import Verdict
from hf_taskvec.evaluation.texts.books import Book, Role, all_kept, load_book
from hf_taskvec.forgetting import ForgetCase, search_edits
from hf_taskvec.forgetting.edit_kinds import EditKind
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer
from hf_taskvec.training import TrainingSettings
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.training_stages import TrainingStages

WORDS, BLOCK = 1650, 128
CRITERIA = Criteria(membership=0.05, retain_bound=0.05)
PROTOCOL = protocols.get("taskvec-v1", prompt_length=12, answer_length=12, placement="stride", stride=24, samples=None)
FULL = TrainingSettings(epochs=8, learning_rate=5e-4, batch_size=4)
LORA = TrainingSettings(method="lora", epochs=8, learning_rate=2e-3, batch_size=2, rank=32)
# Half of a retraining's epochs, in twice as many steps.
REPAIR = replace(FULL, epochs=4, batch_size=2)
LORA_REPAIR = replace(LORA, epochs=4, learning_rate=3e-3)
ROLES: tuple[Role, ...] = ("forget", "aligned", "retain")
#: name, from which vectors, which kinds, how repaired, and how many tries
Way = tuple[str, str, tuple[EditKind, ...], TrainingSettings, int]
WAYS: tuple[Way, ...] = (
    ("", "full", ("negate", "repair"), REPAIR, 2),
    ("project, ", "projected", ("project", "repair"), REPAIR, 2),
    ("lora, ", "lora", ("negate", "repair"), LORA_REPAIR, 2),
    ("lora, full ", "lora", ("repair",), REPAIR, 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="θ_0: a folder")
    parser.add_argument("--books", nargs="+", required=True, metavar="NAME=FORGET,ALIGNED,RETAIN")
    parser.add_argument("--seeds", type=int, nargs="+", default=[30, 31, 32, 33, 34])
    parser.add_argument("--ways", nargs="+", choices=["full", "projected", "lora"], default=["full", "projected"])
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="also repair on these shares of the text")
    parser.add_argument("--output", type=Path, default=Path("outputs/seeds-forget"))
    parser.add_argument("--only-table", action="store_true", help="run nothing; show what is finished")
    options = parser.parse_args()
    pairs = {name: files.split(",") for name, _, files in (each.partition("=") for each in options.books)}
    for seed in () if options.only_table else options.seeds:
        for name, files in pairs.items():
            folder = options.output / f"{name}-{seed}"
            run_case(options.model, files, seed, folder, options.ways, options.shares)
    for name in pairs:
        found = {seed: options.output / f"{name}-{seed}" for seed in options.seeds}
        done = {seed: folder for seed, folder in found.items() if (folder / "costs.json").exists()}
        if done:
            print(f"\n### {name}\n\n{case_table(done)}")


# One case.


@dataclass(frozen=True)
class Parts:
    """The models, vectors and texts of a case."""

    base: str
    joint: Path
    reference: Path
    stages: TrainingStages
    seed: int
    blocks: Callable[..., Any]


def run_case(
    base: str, files: list[str], seed: int, folder: Path, ways: list[str], shares: list[float]
) -> UnlearningReport:
    """Everything of one case; what is finished is not done again."""
    tokenizer = load_tokenizer(base)
    stages = TrainingStages(
        folder / "stages", tokenizer=tokenizer, checkpoint_every=0, progress=False, tell=lambda line: say(folder, line)
    )
    books = tuple(read(path, role, seed) for path, role in zip(files, ROLES, strict=True))
    forget, *kept = books

    def blocks(*some: Book) -> Any:
        import datasets

        return datasets.concatenate_datasets([book.training_blocks(tokenizer, BLOCK) for book in some])

    def train(name: str, settings: TrainingSettings, *some: Book) -> Path:
        return stages.train(name, base, blocks(*some), replace(settings, seed=seed))

    joint, reference = train("joint", FULL, *books), train("retrained", FULL, *kept)
    full = TaskVector.from_finetuned(base, train("forget", FULL, forget), name="forget")
    vectors: dict[str, tuple[TaskVector, dict[str, TaskVector]]] = {"full": (full, {})}
    if "projected" in ways:
        own = {b.role: TaskVector.from_finetuned(base, train(b.role, FULL, b), name=b.role) for b in kept}
        vectors["projected"] = (full, {str(role): vector for role, vector in own.items()})
    if "lora" in ways:
        adapter = train("forget-lora", LORA, forget)
        vectors["lora"] = (TaskVector.from_adapter(adapter, base=base, name="forget"), {})
    model, never = load_for_evaluation(joint), load_for_evaluation(reference)
    asking = partial(
        sweep,
        model,
        books=all_kept(books),
        protocol=PROTOCOL,
        tokenizer=tokenizer,
        reference={"retrained": never, "θ_0": load_for_evaluation(base)},
        store=folder / "store",
        batch_size=64,
        criteria=CRITERIA,
        seed=seed,
        progress=False,
    )
    case = ForgetCase(
        address=joint,
        model=model,
        vector=full,
        keep_vectors={},
        forget_blocks=blocks(forget),
        keep_blocks=blocks(*kept),
        reference=never,
        criteria=CRITERIA,
        repairing=replace(REPAIR, seed=seed),
        repairs=folder / "stages",
        progress=False,
    )
    edits: dict[str, TaskVector] = {}
    costs: dict[str, Any] = {}
    for prefix, which, kinds, settings, rounds in WAYS:
        if which not in ways:
            continue
        vector, keep = vectors[which]
        began = time.perf_counter()
        mine = replace(case, vector=vector, keep_vectors=keep, repairing=replace(settings, seed=seed))
        found = search_edits(mine, kinds, lambda tried: asking(tried, None), rounds=rounds)
        tries = 0
        for edit in found.tried:
            tries += edit.kind == "repair"
            name = f"{prefix}repair, try {tries}" if edit.kind == "repair" else f"{prefix}{edit.kind}".rstrip(", ")
            name = {"project, project": "project"}.get(name, name)
            edits[name] = edit.vector
            costs[name] = {"strength": edit.strength, "epochs": edit.epochs, "tokens": edit.tokens}
            if edit is found.judged:
                costs[name]["judged"] = "nearest" if found.chosen is None else "chosen"
            say(folder, f"{name}: {edit.name}, {edit.tokens} tokens, {edit.seconds:.0f} s")
        say(folder, f"{prefix or 'repair '}{time.perf_counter() - began:.0f} s in all")
    for share in shares:
        name = f"repair on {share:.0%} of the kept text"
        rows = case.keep_blocks.shuffle(seed=seed)
        some = rows.select(range(max(1, round(share * len(rows)))))
        found = search_edits(replace(case, keep_blocks=some), ("repair",), lambda tried: asking(tried, None), rounds=1)
        edits[name], costs[name] = found.tried[0].vector, {"tokens": found.tried[0].tokens}
    brief = train("brief", REPAIR, *kept)
    edits["brief retraining"] = TaskVector.from_finetuned(joint, brief, name="brief")
    costs["brief retraining"] = {"tokens": REPAIR.epochs * case.keep_blocks.num_rows * BLOCK}
    report = asking(edits, None)
    report.save(folder, plots=False)
    speed = Finetuned.load(reference).tokens_per_second
    retraining = FULL.epochs * case.keep_blocks.num_rows * BLOCK
    told = {"retraining": {"tokens": retraining, "tokens_per_second": speed}, "edits": costs}
    (folder / "costs.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", "utf-8")
    say(folder, "done")
    return report


def read(path: str, role: Role, seed: int) -> Book:
    """The beginning of a book; of the one to forget, as much again is held out."""
    import datasets

    held_out = 0.5 if role == "forget" else 0.0
    words = WORDS * (2 if held_out else 1)
    whole = load_book(path, held_out=0.0)
    text = " ".join(whole.text.split(" ")[:words])
    data = datasets.Dataset.from_dict({"text": [text]})
    return load_book(data, whole.name, role=role, block_words=150, held_out=held_out, seed=seed)


def say(folder: Path, line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {folder.name}: {line}", flush=True)


# The table.


def case_table(folders: Mapping[int, Path]) -> str:
    """One row for each edit over the seeds, on the half of the passages that did not choose."""
    verdicts: dict[str, dict[int, Verdict]] = {}
    costs: dict[str, list[float]] = {}
    for seed, folder in folders.items():
        report = UnlearningReport.load(folder)
        told = json.loads((folder / "costs.json").read_text("utf-8"))
        for scale, verdict in verdicts_by_scale(report).items():
            name = report.names.short(scale)
            verdicts.setdefault(name, {})[seed] = verdict
            spent = told["edits"].get(name, {}).get("tokens", 0) / told["retraining"]["tokens"]
            costs.setdefault(name, []).append(spent)
    heads = ["edit", "seeds", *(f"R, {metric}" for metric in PRIMARY), "AUC − reference's", "kept books lost, at most"]
    rows = []
    for name, found in verdicts.items():
        cells = [spread([relative(v, metric) for v in found.values()]) for metric in PRIMARY]
        apart = spread([v.membership[0].difference.value for v in found.values()], sign=True)
        lost = spread([100 * worst(v) for v in found.values()], digits=0) + " %"
        reached = [sum(test(v) for v in found.values()) for test in (forgets, private, keeps, reaches)]
        cost = f"{fmean(costs[name]):.2f}"
        rows.append([name, str(len(found)), *cells, apart, lost, cost, *(f"{n}/{len(found)}" for n in reached)])
    heads += ["cost of one, in retrainings", "four R within", "AUC within", "kept", "all"]
    note = "Means over seeds [smallest, largest]; the cost is that of the repair alone, in tokens that were trained on."
    return f"{markdown_table(heads, rows)}\n\n{note}"


def relative(verdict: Verdict, metric: str) -> float:
    found = next(each for each in verdict.metrics if each.metric == metric).relative
    return float("nan") if found is None else found.value


def worst(verdict: Verdict) -> float:
    return max(each.lost.value for each in verdict.retained)


def forgets(verdict: Verdict) -> bool:
    return all(CRITERIA.low <= relative(verdict, metric) <= CRITERIA.high for metric in PRIMARY)


def private(verdict: Verdict) -> bool:
    return abs(verdict.membership[0].difference.value) <= CRITERIA.membership


def keeps(verdict: Verdict) -> bool:
    return worst(verdict) <= CRITERIA.retain_bound


def reaches(verdict: Verdict) -> bool:
    return forgets(verdict) and private(verdict) and keeps(verdict)


def spread(values: list[float], digits: int = 2, sign: bool = False) -> str:
    form = f"{'+' if sign else ''}.{digits}f"
    mean, low, high = (f"{value:{form}}".replace("-", "−") for value in (fmean(values), min(values), max(values)))
    return f"{mean} [{low}, {high}]" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
