"""Edits that really forget, over pairs of books and seeds: the tables of docs/results.md.

    python tests/benchmarks/seeds_forget.py --model FOLDER_OF_STORIES15M \\
        --books oz=wizard.txt,land.txt,pride.txt alice=alice.txt,glass.txt,pride.txt land=land.txt,wizard.txt,glass.txt
    python tests/benchmarks/seeds_forget.py ... --ways lora                     # from LoRA vectors of rank 32
    python tests/benchmarks/seeds_forget.py ... --adapters                      # where all models are LoRA fine-tunes
    python tests/benchmarks/seeds_forget.py ... --shares 0.1 0.25 0.5 --unseen  # repaired on less of the kept text
    python tests/benchmarks/seeds_forget.py --only-table                        # what docs/evidence has so far

Each case is a book to forget, its sequel or prequel, and an unrelated one, 1,650 seen words each (of the first as many
held out for the membership test), and a seed: of the training, the split and the order. θ_0' is θ_0 fine-tuned on all
three, the reference θ_0 fine-tuned on the two to keep, and every edit is judged beside it. Every twelfth word begins a
passage of 12 + 12 words, so that the answers are the whole text, each word once. Tried are

- `negate`: −λτ at the λ where the book's loss is that of the reference;
- `project` (with `--ways projected`): −λτ⊥ + 0.5 (τ_aligned + τ_retain) at that λ;
- `repair`: a negation beyond chance, then a fine-tune on the two books to keep for half of a retraining's epochs;
  `repair, adjusted`: a little more or less of τ after it, without training, as the verdict on the choosing half says;
  `second repair`: where neither qualifies, one that the verdict sets (`hf_taskvec.forgetting`), usually of more epochs;
- `project, repair` and so on: the same from the projected edit;
- `lora, repair` and so on (with `--ways lora`): the same from a LoRA vector, repaired in full;
- `adapters: …` (with `--adapters`): all of it where θ_0', the reference and the vector are LoRA fine-tunes of θ_0, as
  they are for users who have adapters; repaired in full, and (`all by LoRA`) by LoRA, so that the edit is low-rank;
- `repair on …`: on a share of the kept text, or (`--unseen`) on the next words of the same books, which no model saw;
- `retraining`: the reference itself, for what it loses of the kept books;
- `another retraining` (with `--again`): the same with another order of the text, beside the reference: how near to a
  retrained model another one comes;
- `brief retraining`: θ_0 fine-tuned on the two books for as long as one repair: what the repair's budget buys without
  any vector.

A finished case is written to docs/evidence/forget, from which the tables are made, and is not run again.

What was fixed before the reported seeds (50 to 54) were run, after seeds below 30, two cases of seed 40, and two of
earlier settings (30, 34): all settings in this file, and the goal for a case: R of Rouge-L, loss, extraction strength
and exact memorisation within 0.8 and 1.2, the membership AUC within 0.05 of the reference's, and no more than 5 % lost
by a kept book in any of the four, as means over the half of the passages that did not choose the edit; the first repair
costs half of a retraining. Reported is every case, whatever it says. Expected: that `negate` never gets there; that the
first repair gets the four R there in nearly every case, its AUC −0.05 to 0.1 above the reference's, and its worst loss
of a kept book, by extraction strength, at 3 to 12 %, and that retraining itself loses as much of the untouched model's;
that the adjustment brings the AUC to within 0.05 where the kept books allow it, and costs them 1 to 4 %; so that the
whole goal is reached at half of the cost in few cases, and in most with the second repair; that from a LoRA vector it
is reached in none, R by the loss staying lowest.

For `--adapters` the settings are those of the best of some attempts on seed 11 of Oz (repairs in batches of 2 and of 1,
three learning rates by LoRA: 10 % of a kept book was lost and nothing, by LoRA 23 to 73 %); the goal and the reported
seeds are the same. Expected, before any of these was run: that the four R are within 0.8 and 1.2 in nearly every case,
as from full vectors, the vector being one of what LoRA did; that the repair in full loses −5 to 10 % of a kept book and
its AUC is −0.05 to 0.12 above the reference's, so that the whole goal is reached in a third of the cases; that the
repair by LoRA loses 10 to 35 % at the same R, more than retraining by LoRA.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_taskvec import TaskVector
from hf_taskvec._version import __version__
from hf_taskvec.evaluation import Criteria, protocols, sweep
from hf_taskvec.evaluation.reporting.rechoosing import verdicts_by_scale
from hf_taskvec.evaluation.reporting.verdict_tables import markdown_table
from hf_taskvec.evaluation.scoring.metrics import PRIMARY
from hf_taskvec.evaluation.scoring.verdict import Verdict
from hf_taskvec.evaluation.texts.books import Book, Role, all_kept, load_book
from hf_taskvec.forgetting import EditSearch, ForgetCase, TriedEdit, search_edits
from hf_taskvec.forgetting.edit_kinds import EditKind
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer
from hf_taskvec.training import TrainingSettings
from hf_taskvec.training.run_record import Finetuned
from hf_taskvec.training.training_stages import TrainingStages

WORDS, BLOCK = 1650, 128
CRITERIA = Criteria(membership=0.05, retain_bound=0.05)
# Each answer is the next passage's prompt: no leak, as each passage is asked by itself.
PROTOCOL = protocols.get(
    "taskvec-v1",
    prompt_length=12,
    answer_length=12,
    placement="stride",
    stride=12,
    samples=None,
    leak_free=False,
)
FULL = TrainingSettings(epochs=8, learning_rate=5e-4, batch_size=4)
LORA = TrainingSettings(method="lora", epochs=8, learning_rate=2e-3, batch_size=2, rank=32)
# Half of a retraining's epochs, in twice as many steps.
REPAIR = replace(FULL, epochs=4, batch_size=2, learning_rate=4e-4)
LORA_REPAIR = replace(LORA, epochs=4, learning_rate=3e-3)
# The same tokens in four times as many steps, where all models are LoRA fine-tunes.
ADAPTERS_REPAIR = replace(REPAIR, batch_size=1, learning_rate=3e-4)
ADAPTERS_LORA_REPAIR = replace(LORA_REPAIR, batch_size=1, learning_rate=2e-3)
ROLES: tuple[Role, ...] = ("forget", "aligned", "retain")
#: name, from which vectors, which kinds, and how repaired
Way = tuple[str, str, tuple[EditKind, ...], TrainingSettings]
WAYS: tuple[Way, ...] = (
    ("", "full", ("negate", "repair"), REPAIR),
    ("project, ", "projected", ("project", "repair"), REPAIR),
    ("lora, ", "lora", ("negate", "repair"), REPAIR),
    ("all by LoRA, ", "all-lora", ("repair",), LORA_REPAIR),
)
ADAPTERS_WAYS: tuple[Way, ...] = (
    ("", "lora", ("negate", "repair"), ADAPTERS_REPAIR),
    ("all by LoRA, ", "all-lora", ("repair",), ADAPTERS_LORA_REPAIR),
)
BY_LORA = {"lora", "all-lora"}
REPAIRS = 2
SHARE, UNSEEN = "repair on {:.0%} of the kept text", "repair on other text of the same books"
AGAIN = "another retraining"
ADAPTERS = "adapters: "
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "forget"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="θ_0: a folder")
    parser.add_argument("--books", nargs="+", default=[], metavar="NAME=FORGET,ALIGNED,RETAIN")
    parser.add_argument("--seeds", type=int, nargs="+", default=[50, 51, 52, 53, 54])
    parser.add_argument("--ways", nargs="*", choices=[which for _, which, *_ in WAYS], default=None)
    parser.add_argument("--adapters", action="store_true", help="all models are LoRA fine-tunes, of rank 32")
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="also repair on these shares of the text")
    parser.add_argument("--unseen", action="store_true", help="also repair on the next words of the kept books")
    parser.add_argument("--again", action="store_true", help="also a second retraining, beside the first")
    parser.add_argument("--output", type=Path, default=Path("outputs/seeds-forget"))
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="where finished cases are written")
    parser.add_argument("--only-table", action="store_true", help="run nothing; show what is finished")
    options = parser.parse_args()
    if options.ways is None:
        options.ways = ["lora", "all-lora"] if options.adapters else ["full"]
    if options.adapters and (options.shares or options.unseen or options.again or not set(options.ways) <= BY_LORA):
        parser.error("--adapters goes with --ways lora all-lora alone.")
    pairs = {name: files.split(",") for name, _, files in (each.partition("=") for each in options.books)}
    for seed in () if options.only_table else options.seeds:
        for name, files in pairs.items():
            path = options.evidence / f"{name}-{seed}.json"
            if not is_finished(path, options):
                keep_evidence(path, run_case(options, files, seed, options.output / f"{name}-{seed}"))
    cases = [json.loads(path.read_text("utf-8")) for path in sorted(options.evidence.glob("*.json"))]
    print(case_table(cases))


# One case.


def run_case(options: argparse.Namespace, files: list[str], seed: int, folder: Path) -> dict[str, Any]:
    """Everything of one case; what is finished is not done again."""
    base, ways, whole = options.model, options.ways, LORA if options.adapters else FULL
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

    def train_model(name: str, settings: TrainingSettings, *some: Book) -> Path:
        return stages.train_model(name, base, blocks(*some), replace(settings, seed=seed))

    joint, reference = train_model("joint", whole, *books), train_model("retrained", whole, *kept)
    vectors: dict[str, tuple[TaskVector, dict[str, TaskVector]]] = {}
    if not options.adapters:
        full = TaskVector.from_finetuned(base, train("forget", FULL, forget), name="forget")
        vectors["full"] = (full, {})
    if "projected" in ways:
        own = {b.role: TaskVector.from_finetuned(base, train(b.role, FULL, b), name=b.role) for b in kept}
        vectors["projected"] = (full, {str(role): vector for role, vector in own.items()})
    if BY_LORA & set(ways):
        adapter = train("forget-lora", LORA, forget)
        vectors["lora"] = vectors["all-lora"] = (TaskVector.from_adapter(adapter, base=base, name="forget"), {})
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
        vector=next(iter(vectors.values()))[0],
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
    made: dict[str, dict[str, Any]] = {}

    def take(name: str, edit: TriedEdit, tokens: int) -> None:
        edits[name] = edit.vector
        made[name] = {"edit": edit.name, "tokens": tokens}
        if edit.steps:
            made[name] |= {"steps": edit.steps, "seconds": round(edit.seconds, 1), "peak_bytes": edit.peak_bytes}

    for prefix, which, kinds, settings in ADAPTERS_WAYS if options.adapters else WAYS:
        if which not in ways:
            continue
        vector, keep = vectors[which]
        mine = replace(case, vector=vector, keep_vectors=keep, repairing=replace(settings, seed=seed))
        found = search_edits(mine, kinds, lambda tried: asking(tried, None), rounds=REPAIRS)
        repairs = [edit for edit in found.tried if edit.kind == "repair"]
        for edit in found.tried:
            say(folder, f"{prefix}{edit.name}: {edit.tokens} tokens, {edit.seconds:.0f} s")
            if edit.kind != "repair":
                take(f"{prefix}{edit.kind}".removeprefix("project, "), edit, 0)
        first = [repairs[0], *takewhile(lambda edit: edit.after, repairs[1:])]
        take(f"{prefix}repair", first[0], first[0].tokens)
        take(f"{prefix}repair, adjusted", nearest(found, first), first[0].tokens)
        # Every repair was trained, whichever came nearest.
        trained = sum(edit.tokens for edit in repairs if not edit.after)
        take(f"{prefix}search", nearest(found, repairs), trained)
    texts = {SHARE.format(share): share_of(case.keep_blocks, share, seed) for share in options.shares}
    if options.unseen:
        unseen = (read(path, role, seed, skip=WORDS) for path, role in zip(files[1:], ROLES[1:], strict=True))
        texts[UNSEEN] = blocks(*unseen)
    for name, some in texts.items():
        # As many steps as on all of the text, so that only the text differs.
        epochs = round(REPAIR.epochs * len(case.keep_blocks) / len(some))
        mine = replace(case, keep_blocks=some, repairing=replace(REPAIR, epochs=epochs, seed=seed))
        found = search_edits(mine, ("repair",), lambda tried: asking(tried, None), rounds=1)
        take(name, nearest(found, list(found.tried)), found.tried[0].tokens)
        say(folder, f"{name}: {made[name]['edit']}")
    retraining = whole.epochs * case.keep_blocks.num_rows * BLOCK
    if "full" in ways or options.adapters:
        edits["retraining"] = TaskVector.from_finetuned(joint, reference, name="retraining")
        made["retraining"] = {"edit": "θ_0, retrained", "tokens": retraining}
    if "full" in ways:
        brief = train("brief", REPAIR, *kept)
        edits["brief retraining"] = TaskVector.from_finetuned(joint, brief, name="brief")
        made["brief retraining"] = {"edit": "θ_0, trained", "tokens": REPAIR.epochs * case.keep_blocks.num_rows * BLOCK}
    if options.again:
        other = replace(FULL, seed=seed + 1000)
        again = stages.train(AGAIN, base, blocks(*kept), other)
        edits[AGAIN] = TaskVector.from_finetuned(joint, again, name="again")
        made[AGAIN] = {"edit": "θ_0, retrained", "tokens": retraining}
    report = asking(edits, None)
    asked = [
        *["adapters"] * options.adapters,
        *ways,
        *map(str, options.shares),
        *["unseen"] * options.unseen,
        *["again"] * options.again,
    ]
    report.save(folder / "-".join(asked), plots=False)
    for scale, verdict in verdicts_by_scale(report).items():
        if not scale:  # untouched
            continue
        told = made[report.names.short(scale)]
        told |= figures(verdict) | {"cost": round(told.pop("tokens") / retraining, 3)}
    say(folder, "done")
    speed = Finetuned.load(stages.trained(reference)).tokens_per_second
    return {
        "case": folder.name,
        "library": f"hf_taskvec {__version__}",
        "retraining": {"tokens": retraining, "seconds": round(retraining / speed, 1)},
        "edits": {f"{ADAPTERS if options.adapters else ''}{name}": each for name, each in made.items()},
    }


def nearest(search: EditSearch, some: list[TriedEdit]) -> TriedEdit:
    """Of some edits the one that misses least on the choosing half; the first of those that miss nothing."""
    assert search.report.choice is not None
    missed = {search.report.names.short(each.scale): each.shortfall for each in search.report.choice.candidates}
    return min(some, key=lambda edit: missed[edit.name])


def share_of(rows: Any, share: float, seed: int) -> Any:
    return rows.shuffle(seed=seed).select(range(max(1, round(share * len(rows)))))


def figures(verdict: Verdict) -> dict[str, Any]:
    """What the half that did not choose says, as numbers."""
    (member,) = verdict.membership
    return {
        "R": {
            each.metric: None if each.relative is None else round(each.relative.value, 4) for each in verdict.metrics
        },
        "AUC": [round(member.auc.value, 4), round(member.auc.value - member.difference.value, 4)],
        "lost": {f"{each.book}: {each.metric}": round(each.lost.value, 4) for each in verdict.retained},
        "outcome": [verdict.outcome, verdict.kept],
    }


def is_finished(path: Path, options: argparse.Namespace) -> bool:
    """Whether a case was written before, with all that is asked for now."""
    wanted = {f"{prefix}search" for prefix, which, *_ in WAYS if which in options.ways}
    if options.adapters:
        wanted = {f"{ADAPTERS}{prefix}search" for prefix, which, *_ in ADAPTERS_WAYS if which in options.ways}
    wanted |= {SHARE.format(share) for share in options.shares} | ({UNSEEN} if options.unseen else set())
    wanted |= {AGAIN} if options.again else set()
    return path.exists() and wanted <= json.loads(path.read_text("utf-8"))["edits"].keys()


def keep_evidence(path: Path, found: dict[str, Any]) -> None:
    """Write a case, beside what an earlier run wrote of its other edits."""
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        found = before | {"edits": before["edits"] | found["edits"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read(path: str, role: Role, seed: int, skip: int = 0) -> Book:
    """The beginning of a book, or what follows some words; of the one to forget, as much again is held out."""
    import datasets

    held_out = 0.5 if role == "forget" else 0.0
    words = WORDS * (2 if held_out else 1)
    whole = load_book(path, held_out=0.0, prose=False)  # as its first cases were made
    text = " ".join(whole.text.split(" ")[skip : skip + words])
    data = datasets.Dataset.from_dict({"text": [text]})
    return load_book(data, whole.name, role=role, block_words=150, held_out=held_out, seed=seed)


def say(folder: Path, line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {folder.name}: {line}", flush=True)


# The table.


def case_table(cases: list[dict[str, Any]]) -> str:
    """One row for each edit over all cases, on the half of the passages that did not choose."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        for name, edit in case["edits"].items():
            by_name.setdefault(name, []).append(edit)
    heads = ["edit", "cases", *(f"R, {metric}" for metric in PRIMARY), "AUC − reference's", "kept books lost, at most"]
    heads += ["cost, in retrainings", "four R within", "AUC within", "kept", "all"]
    rows = []
    for name, edits in by_name.items():
        cells = [spread([edit["R"][metric] for edit in edits]) for metric in PRIMARY]
        apart = spread([edit["AUC"][0] - edit["AUC"][1] for edit in edits], sign=True)
        lost = spread([100 * worst(edit) for edit in edits], digits=0) + " %"
        reached = [sum(test(edit) for edit in edits) for test in (forgets, private, keeps, reaches)]
        cost = f"{fmean(edit['cost'] for edit in edits):.2f}"
        rows.append([name, str(len(edits)), *cells, apart, lost, cost, *(f"{n}/{len(edits)}" for n in reached)])
    note = (
        "Means over cases [smallest, largest]; the cost is that of the repairs alone, in tokens that were trained on."
    )
    return f"{markdown_table(heads, rows)}\n\n{note}"


def worst(edit: dict[str, Any]) -> float:
    return float(max(edit["lost"].values()))


def forgets(edit: dict[str, Any]) -> bool:
    return all(CRITERIA.low <= value <= CRITERIA.high for value in edit["R"].values())


def private(edit: dict[str, Any]) -> bool:
    return bool(abs(edit["AUC"][0] - edit["AUC"][1]) <= CRITERIA.membership)


def keeps(edit: dict[str, Any]) -> bool:
    return worst(edit) <= CRITERIA.retain_bound


def reaches(edit: dict[str, Any]) -> bool:
    return forgets(edit) and private(edit) and keeps(edit)


def spread(values: list[float], digits: int = 2, sign: bool = False) -> str:
    form = f"{'+' if sign else ''}.{digits}f"
    mean, low, high = (f"{value:{form}}".replace("-", "−") for value in (fmean(values), min(values), max(values)))
    return f"{mean} [{low}, {high}]" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
