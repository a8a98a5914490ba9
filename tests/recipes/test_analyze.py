"""The recipe that reports on a base and its fine-tunes: real (tiny) models, an adapter and a saved vector."""

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import launch
from support.hub_server import HubServer
from support.tiny_books import STORY, make_books, make_tokenizer, tiny_llama, train
from support.tiny_models import TinyModels
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.errors import MismatchError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "analyze.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analyze")
    tokenizer, books, base = make_tokenizer(), make_books(), tiny_llama()
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tuned = train(copy.deepcopy(base), tokenizer, books[:1], 20)
    tuned.save_pretrained(folder / "full")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    train(get_peft_model(copy.deepcopy(base), config), tokenizer, books[1:], 20, lr=1e-2).save_pretrained(
        folder / "lora"
    )
    (0.5 * TaskVector.from_finetuned(base, tuned)).save(folder / "saved")
    (folder / "lamps.txt").write_text(STORY[:6000])
    (folder / "boats.txt").write_text(STORY[6000:12000].replace("lamps", "boats"))
    return folder


def load_recipe() -> Any:
    spec = importlib.util.spec_from_file_location("analyze", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def analyze(*arguments: object) -> str:
    """The report that the recipe writes."""
    return load_recipe().main([str(argument) for argument in arguments]).read_text("utf-8")


def test_the_report_has_every_section_when_all_is_given(folder: Path, tmp_path: Path) -> None:
    texts = [folder / "lamps.txt", folder / "boats.txt"]
    options = ["--data", *texts, "--rows", 4, "--max-length", 24, "--landscape", 3, "--epochs", folder / "full"]
    report = analyze(folder / "base", folder / "full", folder / "lora", *options, "--output", tmp_path)
    for title in (
        "The vectors",
        "Cosines",
        "Stable ranks",
        "Epoch by epoch",
        "Task correlation",
        "λ from theory",
        "Gradients",
    ):
        assert f"## {title}" in report
    assert "## Linearity: full and lora" in report and "## Landscape: full and lora" in report
    shown = re.findall(r"\]\((.+?)\)", report)
    assert len(shown) == len(set(shown)) == 10
    for name in shown:
        assert (tmp_path / name).stat().st_size > 5000 and (tmp_path / name).with_suffix(".svg").exists()
    assert str(folder) not in report  # no path of the machine
    forms = dict(re.findall(r"\n\| full \| lora \| (literal|relative) \| (\S+) \|", report))
    assert len(set(forms.values())) == len(forms) == 2
    assert "with the negative gradient" in report  # epoch by epoch
    assert "lora: its factors have rank 4 or less; 90 %" in report


def test_parallel_vectors_span_no_landscape_and_the_report_says_so(folder: Path, tmp_path: Path) -> None:
    """Each task may be the one without a vector; `saved` is half of `full`, and spans no plane with it."""
    texts = [folder / "lamps.txt", folder / "lamps.txt", folder / "boats.txt"]
    options = ["--data", *texts, "--rows", 4, "--max-length", 24, "--landscape", 3, "--output", tmp_path]
    report = analyze(folder / "base", folder / "full", folder / "saved", folder / "lora", *options)
    assert "## Transfer" in report
    assert re.search(r"\| lora \| full, saved \| \+(0\.[2-9]|1\.0)\d+ \| (?!works)", report)  # they are related
    assert "Not drawn: the two vectors are parallel" in report
    for pair in ("full, saved", "full, lora", "saved, lora"):
        assert re.search(rf"\n{pair}\. \*add\*: The tasks .+\*forget\*: The tasks ", report)


def test_without_texts_only_the_weights_are_reported(folder: Path, tmp_path: Path) -> None:
    report = analyze(folder / "base", folder / "full", folder / "saved", "--names", "a", "b", "--output", tmp_path)
    assert "| a | full fine-tune | dense |" in report and "correlation.png" not in report
    one = analyze(folder / "base", folder / "lora", "--output", tmp_path / "one")
    assert "Cosines need two vectors" in one
    assert "linearity, gradients." in one and "landscape" not in one
    asked = analyze(folder / "base", folder / "lora", "--landscape", 3, "--output", tmp_path / "asked")
    assert "linearity, gradients, the landscape." in asked


def test_with_one_vector_the_report_says_what_takes_two(folder: Path, tmp_path: Path) -> None:
    """What takes two is said to be left out."""
    options = ["--data", folder / "lamps.txt", "--rows", 4, "--max-length", 24, "--landscape", 3, "--output", tmp_path]
    report = analyze(folder / "base", folder / "full", *options)
    assert "## Gradients" in report
    assert "Not measured: correlation, and linearity, are of two" in report
    assert "Not drawn: a plane goes through the base and two" in report


def test_epochs_may_be_vectors_adapters_and_checkpoints(folder: Path, tmp_path: Path) -> None:
    """Saved vectors, as training writes them, adapters and checkpoints."""
    steps = [folder / "saved", folder / "full", folder / "lora"]
    report = analyze(folder / "base", folder / "full", "--epochs", *steps, "--output", tmp_path)
    assert "## Epoch by epoch" in report and "\n| 2 |" in report and "\n| 3 |" in report
    assert re.search(r"\n\| 2 \| [\d.]+% \| 1\.000 \|", report)  # `saved` is half of `full`: the second half is as long
    again = analyze(folder / "base", folder / "full", "--epochs", *steps[:1] * 2, "--output", tmp_path / "again")
    assert "Not measured: epoch 2 changed nothing" in again


def test_what_a_vector_leaves_alone_has_no_rank_and_the_report_goes_on(folder: Path, tmp_path: Path) -> None:
    """Frozen matrices have no rank, and what changes no matrix has none at all; the report goes on."""
    vector = TaskVector.from_finetuned(folder / "base", folder / "full")
    attention = {n: vector.dense(n) * ("self_attn" in n) for n in vector}
    TaskVector.from_tensors(attention).save(tmp_path / "attention")
    vector.filter(include="*norm*").save(tmp_path / "norms")
    norms = {n: vector.dense(n) * ("norm" in n) for n in vector}
    TaskVector.from_tensors(norms).save(tmp_path / "zeros")
    tuned = [tmp_path / "attention", tmp_path / "norms", tmp_path / "zeros"]
    report = analyze(folder / "base", *tuned, "--output", tmp_path / "out")
    assert re.search(
        r"\| attention \| [\d.]+ \| Q [\d.]+, .*MLP-1 unchanged, MLP-2 unchanged \| no MLP changed \|", report
    )
    for name in ("norms", "zeros"):
        assert f"{name}: not applicable, because it changes no matrix of attention or of an MLP." in report
    assert "nan" not in report and "ranks_attention.png" in report and "## With texts" in report


def test_every_figure_is_linked_by_a_name_without_spaces(folder: Path, tmp_path: Path) -> None:
    """Figures are files that a link can name; a second run with another grid and text goes through."""
    texts = [folder / "lamps.txt", folder / "boats.txt"]
    tuned = [folder / "base", folder / "full", folder / "lora", "--names", "the lamps", "the boats"]
    for size, rows in ((2, 3), (3, 4)):
        options = ["--data", *texts, "--rows", rows, "--max-length", 16, "--landscape", size, "--output", tmp_path]
        report = analyze(*tuned, *options)
        shown = re.findall(r"\]\((.+?)\)", report)
        assert "linearity_the_lamps-the_boats.png" in shown and "landscape.png" in shown
        assert not any(" " in name for name in shown) and all((tmp_path / name).exists() for name in shown)
    assert len(list((tmp_path / "points").iterdir())) == 2
    page = (tmp_path / "analysis.html").read_text("utf-8")
    assert page.count("<img ") == len(re.findall(r"!\[", report)) and page.count("<h2>") == report.count("\n## ")


def test_a_vector_of_another_model_is_refused_before_any_output(
    folder: Path, models: TinyModels, tmp_path: Path
) -> None:
    models.pair("gpt2").vector().save(tmp_path / "gpt2")
    for arguments in ([tmp_path / "gpt2"], [folder / "full", "--epochs", tmp_path / "gpt2"]):
        with pytest.raises(MismatchError, match="0 of"):
            analyze(folder / "base", *arguments, "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_bases_and_fine_tunes_come_from_the_hub_by_revision(folder: Path, hub: HubServer, tmp_path: Path) -> None:
    """A base and fine-tunes of any kind by their ids, also at a revision."""
    commits = {name: hub.add_repo(f"me/{name}", folder / name) for name in ("base", "full", "lora", "saved")}
    hub.add_repo("me/base", {"README.md": b"Newer, and without weights."})
    text = ["--data", *[folder / "lamps.txt"] * 3, "--rows", 2, "--max-length", 8]
    base = f"me/base@{commits['base']}"
    report = analyze(base, "me/full@main", "me/lora", "me/saved", *text, "--output", tmp_path)
    for row in ("| full | full fine-tune | dense |", "| lora | LoRA adapter", "| saved | 0.5\\*live"):
        assert row in report
    assert "## Gradients" in report


def test_bad_input_is_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    base, full, empty = folder / "base", folder / "full", tmp_path / "empty.txt"
    empty.write_text("")
    for arguments, message in [
        ([full, full, "--names", "a", "a"], "2 different names"),
        ([full, "--data", tmp_path / "missing.txt"], "no file 'missing.txt'"),
        ([full, folder / "lora", "--data", folder / "lamps.txt"], "2 files"),
        ([tmp_path / "nothing"], "no folder 'nothing' at the given path"),
        (["nothing"], "'nothing' is neither a folder here nor a repository"),
        ([full, folder / "lora", "--names", "a/x", "b"], "as for a file"),
        ([full, folder / "lora", "--names", "a b", "a_b"], "would be the same"),
        ([full, "--names", "the_base"], "would be the same"),
        ([full, "--landscape", 1], "two points along a side"),
        ([full, "--batch-size", 0], "--batch-size must be at least 1"),
        ([full, "--max-length", 0], "--max-length must be at least 2"),
        ([full, "--device", "gpu"], "--device gpu cannot be used"),
        ([full, "--epochs", tmp_path / "nothing"], "nothing"),
        ([full, "--data", empty], "empty.txt gives 0 rows"),
    ]:
        with pytest.raises(TaskVectorError, match=message):
            analyze(base, *arguments, "--output", tmp_path / "out")
        assert not (tmp_path / "out" / "analysis.md").exists()


def row_losses(model: Path, text: Path, base: Path, length: int = 24) -> list[float]:
    """The loss of each row of a text, as transformers has it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(text.read_text())["input_ids"]
    rows = [ids[start : start + length] for start in range(0, len(ids) - length, length)][:8]
    with torch.no_grad():
        return [loaded(torch.tensor([row]), labels=torch.tensor([row])).loss.item() for row in rows]


def test_which_scale_without_validation_is_answered_from_the_models_own_text(folder: Path, tmp_path: Path) -> None:
    """One fine-tune twice: at half of the sum the merged model is each task's own, so every rule must say 0.5."""
    twice = [folder / "base", folder / "full", folder / "full", "--names", "one", "two", "--ask", "scale"]
    report = analyze(*twice, "--output", tmp_path / "plain")
    rules = dict(re.findall(r"\n\| ([\w, /.]+) \| ([\d.]+) \|", report))
    assert rules == dict.fromkeys(("agreement", "the mean, 1/n", "norm", "margins"), "0.50") | {"0.4": "0.40"}
    texts = ["--data", folder / "lamps.txt", folder / "lamps.txt", "--rows", 8, "--max-length", 24]
    judged = analyze(*twice, *texts, "--output", tmp_path / "judged")
    losses = row_losses(folder / "full", folder / "lamps.txt", folder / "base")
    assert f"| agreement | 0.50 | {sum(losses) / len(losses):.3f}" in judged
    assert "On the texts that were given, λ = " in judged


def test_whether_one_epoch_is_enough_is_told_by_text(folder: Path, tmp_path: Path) -> None:
    """`saved` is half of `full`, so they make two epochs of one fine-tune; of two, they are merged."""
    texts = ["--data", folder / "lamps.txt", "--rows", 8, "--max-length", 24, "--ask", "epochs"]
    epochs = ["--epochs", folder / "saved", folder / "full"]
    one = analyze(folder / "base", folder / "full", *texts, *epochs, "--output", tmp_path / "one")
    losses = row_losses(folder / "full", folder / "lamps.txt", folder / "base")[1::2]  # the others would choose λ
    assert re.search(rf"\n\| 2 \| {sum(losses) / len(losses):.3f} \\\[.+\| – \|", one)
    assert "**No: the own model of epoch 1 is worse than that of epoch 2" in one  # lamps are what it was trained on
    texts[2:2] = [folder / "boats.txt"]
    two = [folder / "full", folder / "lora", *texts, *epochs, "--epochs", folder / "saved", folder / "lora"]
    merged = analyze(folder / "base", *two, "--output", tmp_path / "two")
    assert "| epoch | own models | merged | λ | more than after the last |" in merged


def test_how_much_weight_decay_is_told_by_what_merges_better(folder: Path, tmp_path: Path) -> None:
    """At either weight decay both tasks, whose texts tell them apart; the halved vector stands for more decay."""
    TaskVector.from_adapter(folder / "lora", base=folder / "base").save(tmp_path / "boats")
    tuned = [folder / "full", tmp_path / "boats", folder / "saved", folder / "lora"]
    texts = [folder / "lamps.txt", folder / "boats.txt"] * 2
    options = ["--decays", 0, 0, 0.5, 0.5, "--ask", "decay", "--rows", 8, "--max-length", 24]
    report = analyze(folder / "base", *tuned, "--data", *texts, *options, "--output", tmp_path / "out")
    whole = TaskVector.from_finetuned(folder / "base", folder / "full") + TaskVector.load(tmp_path / "boats")
    whole.apply(folder / "base", tmp_path / "summed")
    losses = [row_losses(tmp_path / "summed", text, folder / "base") for text in texts[:2]]
    mean = sum(sum(each) / len(each) for each in losses) / 2
    assert re.search(rf"\n\| 0 \| [\d.]+ \| [\d.]+ \| .+ \| {mean:.3f} \\\[.+ \| .+ \|\n\| 0.5 \|", report)
    assert re.search(r"\*\*0(.5)?(, the least that was tried)?: the better merge at 0(.5)? has a loss of", report)


def test_what_a_question_cannot_be_answered_from_is_refused(folder: Path, tmp_path: Path) -> None:
    base, full, lora, text = (folder / name for name in ("base", "full", "lora", "lamps.txt"))
    pair = [full, lora, "--data", text, folder / "boats.txt"]
    for arguments, message in [
        ([full, "--ask", "scale"], "two fine-tunes or more"),
        ([full, "--ask", "epochs", "--epochs", full], "--ask epochs needs --data"),
        ([full, "--ask", "epochs", "--data", text, "--epochs", full], "two epochs or more"),
        ([*pair, "--ask", "epochs", "--epochs", full, full], "needs --epochs 2 times"),
        ([*pair, "--ask", "decay"], "--decays with 2 numbers"),
        ([*pair, "--ask", "decay", "--decays", 0, 0.1], "each task .+ once at each"),
        ([full, "--epochs", full, "--epochs", full], "go with --ask epochs"),
        ([full, "--decays", 0], "--decays goes with --ask decay"),
    ]:
        with pytest.raises(TaskVectorError, match=message):
            analyze(base, *arguments, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_revisions_and_paths_tell_fine_tunes_apart(tmp_path: Path) -> None:
    """Revisions and paths tell fine-tunes apart; a folder may have an @ in its name."""
    (tmp_path / "user@host" / "lora").mkdir(parents=True)
    unique = load_recipe().unique
    assert unique(["me/full@v1", "me/lora"]) == ["full", "lora"]
    assert unique(["me/full@v1", "me/full@v2"]) == ["full_v1", "full_v2"]
    assert unique([f"{tmp_path}/user@host/lora", "me/full"]) == ["lora", "full"]
    assert unique(["a/full", "b/full", "me/lora"]) == ["full_1", "full_2", "lora"]


def test_the_command_says_what_is_wrong_or_where_the_report_is(folder: Path, tmp_path: Path) -> None:
    """One sentence for what is wrong; where the report is, when all is well."""
    (tmp_path / "taken").write_text("")
    arguments = [folder / "base", folder / "full", "--output"]
    taken = launch.run(RECIPE, *arguments, tmp_path / "taken")
    assert taken.returncode == 1 and taken.stdout == "" and "Traceback" not in taken.stderr
    assert taken.stderr.startswith("OutputError: taken cannot be made a folder")
    done = launch.run(RECIPE, *arguments, tmp_path / "out")
    assert done.returncode == 0 and done.stdout.endswith(f"Saved: {tmp_path / 'out' / 'analysis.md'}\n")
