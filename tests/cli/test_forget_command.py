"""`taskvec forget`: the library's call with every setting, what it found on the screen, and its exit code."""

import io
import json
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from support.command_line import Answer
from support.folders import names
from support.memorised_books import learn, make_books_and_tokenizer
from support.tiny_books import tiny_llama

from hf_taskvec import TaskVector
from hf_taskvec.cli import main
from hf_taskvec.evaluation import Criteria, load_book, protocols
from hf_taskvec.filenames import COMMAND_RECORD
from hf_taskvec.forgetting import Forgotten, forget
from hf_taskvec.training import TrainingSettings

ASKED = ["--block-words", 100, "--held-out", 0.25, "--set", "prompt_length=12", "--set", "answer_length=6", "--seed", 3]
TRAINED = ["--epochs", 20, "--learning-rate", 4e-3, "--train-batch-size", 6, "--block-length", 32]
REPAIRED = ["--block-stride", 28, "--repair-epochs", 8, "--repair-learning-rate", 3e-3]
BOOKS = ["--forget", "lost.txt", "--retain", "kept.txt"]
# Tiny models keep little of what they are repaired on: nearly anything may be lost here.
LENIENT = ["--low", 0.5, "--high", 2, "--membership", 0.6, "--retain-bound", 0.9]
NEEDED = ["model", *BOOKS, "--base", "base"]
WHOLE = [*NEEDED, *ASKED, *TRAINED, *REPAIRED, *LENIENT, "--rounds", 2, "--attack", "prompt", "--batch-size", 16]


def taskvec(*arguments: object) -> Answer:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as done:
        main([str(each) for each in arguments])
    return Answer(int(done.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a model that learnt two more books from it, and the books as text files."""
    folder = tmp_path_factory.mktemp("forget")
    tokenizer, books = make_books_and_tokenizer()
    texts = {folder / f"{book.name}.txt": book.text for book in books}
    for path, text in texts.items():
        path.write_text(text)
    lost, near, kept = (load_book(path, block_words=100, held_out=0.25, seed=3) for path in texts)
    with torch.random.fork_rng():
        model = learn(tiny_llama(width=64), tokenizer, (near,), seed=0, epochs=2)
        for name, read in (("base", ()), ("model", (lost, kept))):
            if read:
                learn(model, tokenizer, read, seed=0)
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def answer(folder: Path) -> Answer:
    """The answer of a whole run, to `out`, for scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return taskvec("forget", *WHOLE, "-o", "out", "--json")


@pytest.fixture
def done(answer: Answer, folder: Path) -> Forgotten:
    assert answer.code == 0, answer.err
    return Forgotten.load(folder / "out")


@pytest.fixture
def vector(done: Forgotten, folder: Path) -> Path:
    """The vector of the book that the run has made."""
    if not (folder / "lost-vector").exists():
        (stage,) = (folder / "out" / "stages").glob("forget-*")
        TaskVector.from_finetuned(folder / "base", stage, name="lost").save(folder / "lost-vector")
    return folder / "lost-vector"


def test_the_answer_is_what_the_library_has_found(answer: Answer, done: Forgotten, folder: Path) -> None:
    told = answer.json
    assert done.model == folder / "out" / "model" and done.adapter is None and done.record.written
    assert (told["model"], told["adapter"], told["vector"]) == ("out/model", None, "out/vector")
    assert (told["outcome"], told["passed"], told["sentence"]) == (done.outcome, done.passed, done.sentence)
    assert told["judged"] == told["edit"] == done.edit
    assert told["tried"] == [asdict(each) for each in done.record.tried]
    assert [each["kind"] for each in told["tried"]] == ["negate", "repair"][: len(told["tried"])]
    assert told["vector_tokens"] == done.record.vector_tokens > 0
    choice = done.report.choice
    assert choice is not None and done.audit is not None
    plain = json.loads(done.report.to_json())["choice"]
    assert (told["verdict"], told["criteria"]) == (plain["verdict"], plain["criteria"])
    assert [each["name"] for each in told["candidates"]] == list(map(done.report.names.short, done.report.scales))
    assert told["audit"] == json.loads((folder / "out" / "audit.json").read_text("utf-8"))
    (command,) = json.loads((folder / "out" / COMMAND_RECORD).read_text())["commands"]
    assert command == ["taskvec", "forget", *map(str, WHOLE), "-o", "out", "--json"]


def test_python_with_the_same_settings_goes_on_where_the_command_was(done: Forgotten) -> None:
    """`forget` refuses a folder of any other settings, so all that were typed have arrived."""
    lost, kept = (load_book(f"{name}.txt", block_words=100, held_out=0.25, seed=3) for name in ("lost", "kept"))
    training = TrainingSettings(epochs=20, learning_rate=4e-3, batch_size=6, seed=3)
    again = forget(
        "model",
        lost,
        kept,
        "out",
        base="base",
        rounds=2,
        training=training,
        repairing=replace(training, epochs=8, learning_rate=3e-3, batch_size=3),
        block_length=32,
        block_stride=28,
        protocol=protocols.get(prompt_length=12, answer_length=6),
        criteria=Criteria(low=0.5, high=2.0, membership=0.6, retain_bound=0.9),
        attacks=["prompt"],
        seed=3,
    )
    assert again.report.timing.generated == 0
    assert replace(again.report, timing=done.report.timing) == done.report
    assert (again.sentence, again.record) == (done.sentence, done.record)


def test_the_screen_shows_every_edit_the_verdict_and_the_files(done: Forgotten) -> None:
    shown = taskvec("forget", *WHOLE, "-o", "out")
    assert shown.code == 0, shown.err
    rows = [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in shown.out.splitlines()]
    choice = done.report.choice
    assert choice is not None
    reached = {done.report.names.short(each.scale): each for each in choice.candidates}
    for tried in done.record.tried:
        row = next(row for row in rows if len(row) == 9 and row[1] == tried.kind and tried.name.startswith(row[0]))
        candidate = reached[tried.name]
        for name, cell in zip(choice.criteria.judged, row[2:6], strict=True):
            assert float(cell.replace("−", "-")) == round(candidate.relative[name], 2)
        assert row[7] == f"{100 * candidate.worst_retain:.0f} %".replace("-", "−")
        assert row[8] == ("yes" if candidate.qualifies else "no")
    assert ["metric", "untouched", "edited", "never seen", "R", "says"] in rows
    assert any(row[0] == "attack" and row[-1] == "says" for row in rows)
    assert done.sentence in shown.out
    written = "out: model/, vector/, report.html, report.json, report.md, audit.json, audit.md"
    assert shown.out.splitlines()[-1].startswith(written)


def test_where_nothing_qualifies_all_is_told_but_no_model_written(vector: Path, folder: Path) -> None:
    options = ["--vector", vector, "--edit", "negate", "--attack", "none", "--low", 0.99, "--high", 1.01]
    command = ["forget", *NEEDED, *ASKED, *TRAINED, *options, "--metric", "loss", "--certain", "-o", "strict"]
    refused = taskvec(*command)
    assert refused.code == 1 and "taskvec:" not in refused.err
    strict = Forgotten.load(folder / "strict")
    assert (strict.outcome, strict.model, strict.audit) == ("not_reached", None, None)
    assert strict.record.vector_tokens == 0 and "stages" not in names(folder / "strict")
    assert "no edit qualifies" in refused.out and "(nearest)" in refused.out
    assert "No model was written (--write-anyway writes the nearest)" in refused.out
    assert "strict: vector/, report.html, report.json, report.md and plots" in refused.out
    other = taskvec(*command, "--write-anyway")
    assert other.code == 1 and "holds the results of another config" in other.err
    assert "pass --overwrite to replace them" in other.err
    kept = taskvec(*command, "--keep-vector", f"kept={vector}")
    assert kept.code == 1 and "of another config (vectors: " in kept.err
    written = taskvec(*command, "--write-anyway", "--overwrite", "--json")
    assert written.code == 0, written.err
    assert (written.json["outcome"], written.json["model"]) == ("not_reached", "strict/model")
    assert written.json["edit"] is None and written.json["judged"].endswith("*forget")
    assert written.json["audit"] is None


def test_a_dry_run_tells_what_is_trained_and_promises_no_less_than_is_written(
    done: Forgotten, vector: Path, folder: Path
) -> None:
    before = sorted(folder.rglob("*"))
    plan = taskvec("forget", *WHOLE, "-o", "planned", "--dry-run", "--json")
    assert plan.code == 0, plan.err
    written = sum(path.stat().st_size for path in (folder / "out" / "model").rglob("*"))
    promised = plan.json["writes"]
    assert written <= promised["planned/model"] < written + 1_200_000
    assert (promised["planned/vector"], promised["planned/stages"]) == (None, None)
    weights = {name: (folder / name / "model.safetensors").stat().st_size for name in ("model", "base")}
    assert plan.json["reads"] == weights
    assert plan.json["memory"] == 2 * 6 * weights["model"]  # no relearning: training needs the most
    lost, kept = (load_book(f"{name}.txt", block_words=100, held_out=0.25, seed=3) for name in ("lost", "kept"))
    words = [f"{len(book.training_text.split()):,} words" for book in (lost, kept)]
    notes = plan.json["notes"]
    assert f"the vector is trained: full, 20 epochs over {words[0]} to forget" in notes
    assert any("2 at most: first full, 8 epochs" in note and words[1] in note for note in notes)
    assert "the attacks are prompt" in notes
    options = ["--vector", vector, "--edit", "negate", "-o", "planned", "--dry-run"]
    given = taskvec("forget", *NEEDED, *ASKED, *options).out
    assert "stages" not in given and "trained" not in given and "the attacks are relearn" in given
    assert "the attacks" not in (none := taskvec("forget", *NEEDED, *ASKED, *options, "--attack", "none").out)
    assert "no attack is made" in none
    assert sorted(folder.rglob("*")) == before


def test_the_word_base_is_the_vectors_own(done: Forgotten, folder: Path, tmp_path: Path) -> None:
    (given,) = (folder / "out" / "stages").glob("forget-*")
    shutil.copytree(folder / "base", tmp_path / "first")
    TaskVector.from_finetuned(tmp_path / "first", given, name="lost").save(tmp_path / "vector")
    command = ["forget", "model", *BOOKS, *ASKED, "--vector", tmp_path / "vector", "-o", "x", "--dry-run", "--json"]
    for option in ("--base", "--reference"):
        own, named = (taskvec(*command, option, where).json["reads"] for where in ("base", "./base"))
        assert str(tmp_path / "first") in own and "./base" not in own
        assert str(tmp_path / "first") not in named and "./base" in named


LORA = ["--method", "lora", "--rank", 8]
BAD = [
    (["model", "--forget", "lost.txt", "--base", "base"], r"no text to keep.* as --retain other\.txt\.$"),
    (["model", "--forget", "lost.txt", "--retain", "lost.txt", "--base", "base"], "lost"),
    ([*NEEDED, "--retain", "lost.txt"], "lost"),
    ([*NEEDED, "--edit", "negat"], "no kind of edit 'negat'. Did you mean 'negate'"),
    ([*NEEDED, "--edit", "project"], "give --keep-vector other=PATH"),
    ([*NEEDED, "--edit", "project", "--keep-vector", "forget=base"], "the name 'forget' is that of"),
    ([*NEEDED, "--keep-vector", "kept=nowhere"], "nowhere"),
    (["model", *BOOKS], "neither the book's vector nor a base .*--base BASE, or give --vector PATH"),
    (["model", *BOOKS, "--vector", "base"], "never saw the book: give --base BASE .* or --reference MODEL"),
    (["model", *BOOKS, "--base", "nowhere"], "neither a folder"),
    (["nowhere", *BOOKS, "--base", "base"], "neither a folder"),
    (["model", *BOOKS, "--base", "model"], "the base is the model itself.* --reference MODEL"),
    ([*NEEDED, "--reference", "model"], "the reference is the model itself"),
    ([*NEEDED, "--attack", "relern"], "Did you mean 'relearn'"),
    ([*NEEDED, "--attack", "none", "--attack", "relearn"], "--attack none makes none"),
    ([*NEEDED, "--metric", "rogue_l"], "Did you mean 'rouge_l'"),
    ([*NEEDED, "--low", "0"], "--low 0.0 and --high 1.2 must"),
    ([*NEEDED, "--method", "lorra"], "Did you mean 'lora'"),
    ([*NEEDED, "--rank", "8"], "--rank 8 counts for --method lora only"),
    ([*NEEDED, *LORA, "--learning-rate", "0"], "^taskvec: --learning-rate 0.0 must be a number above 0"),
    ([*NEEDED, "--repair-learning-rate", "-1"], "^taskvec: --repair-learning-rate -1.0 must be a number above 0"),
    ([*NEEDED, "--all-seen", "--held-out", "0.2"], "give one of them"),
    ([*NEEDED, "--block-length", "4000"], "less than one block of --block-length 4000"),
    ([*NEEDED, "--block-length", "16", "--block-stride", "17"], "--block-stride 17 must lie between 1 and"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(map(str, each[0][-2:])) for each in BAD])
def test_bad_input_is_one_sentence_and_writes_nothing(folder: Path, arguments: list[str], message: str) -> None:
    answer = taskvec("forget", *arguments, "--block-words", 100, "-o", "x")
    assert answer.code == 1
    assert re.search(message, answer.err.strip()), answer.err
    assert answer.err.startswith("taskvec: ") and len(answer.err.strip().splitlines()) == 1
    assert "Traceback" not in answer.err and answer.out == ""
    assert not (folder / "x").exists()


@pytest.mark.parametrize("left_out", ["--forget", "--output"])
def test_what_it_cannot_do_without_is_asked_for(left_out: str) -> None:
    needed = {"--forget": "lost.txt", "--output": "x"}
    given = [part for name, value in needed.items() if name != left_out for part in (name, value)]
    answer = taskvec("forget", "model", *given)
    assert answer.code == 2 and left_out in answer.err


def test_an_output_with_files_of_others_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for more in ([], ["--overwrite"]):
        answer = taskvec("forget", *NEEDED, *ASKED, "--block-length", 32, "-o", tmp_path, *more)
        assert answer.code == 1 and "holds other files. Choose a new or empty folder as --output" in answer.err
    assert names(tmp_path) == ["notes.txt"]
    model = taskvec("forget", *NEEDED, *ASKED, "--block-length", 32, "-o", "base")
    assert model.code == 1 and "the folder base holds a model" in model.err
