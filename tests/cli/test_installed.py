"""The installed command, as a user runs it: each subcommand once, and the way from two folders to a pushed model."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support.edited_model import Edited
from support.hub_server import HubServer
from support.tiny_books import make_tokenizer, tiny_llama, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec import TaskVector
from hf_taskvec.evaluation import UnlearningReport, load_book

SMALL = ["--set", "samples=12", "--set", "prompt_length=8", "--set", "answer_length=6", "--block-words", "40"]


@dataclass(frozen=True)
class Command:
    """`taskvec` from an installed wheel, run in a folder."""

    site: Path
    folder: Path

    def __call__(self, *arguments: object, code: int = 0, **environment: str) -> str:
        run = [str(self.site / "bin" / "taskvec"), *map(str, arguments)]
        settings = {**os.environ, "PYTHONPATH": str(self.site), "COLUMNS": "100", **environment}
        done = subprocess.run(run, cwd=self.folder, env=settings, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def json(self, *arguments: object) -> dict:
        return json.loads(self(*arguments, "--json"))


# From two folders to a pushed model


def write_book(path: Path, words: str, seed: int) -> Path:
    """Sentences of random words: nothing to guess, all to learn by heart."""
    draw = random.Random(seed)
    sentences = [" ".join(draw.choices(words.split(), k=6)).capitalize() + "." for _ in range(60)]
    path.write_text(" ".join(sentences))
    return path


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, `tuned` (which learnt lamps.txt), and two books."""
    folder = tmp_path_factory.mktemp("journey")
    lamps = write_book(folder / "lamps.txt", "lamp tree moon river stone glass candle window shadow winter letter", 1)
    write_book(folder / "boats.txt", "boat harbour sail anchor captain storm rope island wave gull tide mast", 2)
    tokenizer = make_tokenizer()
    base = tiny_llama()
    tuned = train(copy.deepcopy(base), tokenizer, [load_book(lamps, block_words=40)], steps=150, lr=5e-3, length=48)
    for name, model in (("base", base), ("tuned", tuned)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "tuned" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


def test_four_commands_lead_from_two_folders_to_a_pushed_model(
    hub: HubServer, installed: Path, two_folders: Path
) -> None:
    taskvec = Command(installed, two_folders)
    taskvec("extract", "base", "tuned", "-o", "lamps")
    books = ["--forget", "lamps.txt", "--retain", "boats.txt", "--reference", "base"]
    books += ["--metric", "rouge_l", "--metric", "loss"]  # a dozen passages are too few for the others
    taskvec("sweep", "lamps", "tuned", *books, "--scales", "0,-0.5,-1", "-o", "report", *SMALL)
    taskvec("apply", "lamps", "tuned", "--report", "report", "-o", "forgot")
    taskvec("push", "forgot", "me/forgot")

    # Pushed: in one commit, and transformers loads it bit for bit.
    assert len(hub.history("me/forgot")) == 2
    loaded = AutoModelForCausalLM.from_pretrained("me/forgot").state_dict()
    assert AutoTokenizer.from_pretrained("me/forgot")("Lamp.").input_ids == make_tokenizer()("Lamp.").input_ids
    report = UnlearningReport.load(two_folders / "report")
    scale = report.choice.scale
    assert scale in (-0.5, -1.0)
    base, tuned = (load_file(two_folders / name / "model.safetensors") for name in ("base", "tuned"))
    for name in base:
        # λ is a power of two, so that fp64 holds the result exactly, and rounding it is the one rounding.
        exact = tuned[name].double() + scale * (tuned[name].double() - base[name].double())
        assert torch.equal(loaded[name], exact.float()), name
    # Evaluated: the report's numbers are on the card.
    files = hub.files("me/forgot")
    assert {"report/report.json", "report/report.md", "report/scores.png", "report/pareto.png"} <= set(files)
    card = ModelCard.load("me/forgot")
    forget = [r for r in card.data.eval_results if (r.dataset_config, r.metric_type) == ("forget", "rouge")]
    seen = next(r.metric_value for r in forget if r.dataset_split == "seen")
    assert seen == pytest.approx(report.score("lamps", scale).value.value, abs=1e-6)
    assert seen < report.score("lamps", 0.0).value.value
    # Documented: licence, provenance, command; and nothing of this machine.
    assert card.data.license == "apache-2.0"  # of the model that was edited
    assert "TaskVector.from_finetuned('./base', './tuned'" in card.text
    assert "taskvec apply lamps tuned --report report -o forgot" in card.text
    assert "no proof of erasure" in card.text
    for name, data in files.items():
        assert str(two_folders).encode() not in data and b"hf_test" not in data, name
    prompt = report.passages[0].prompt.encode()
    assert not [name for name, data in files.items() if prompt in data]


# Each subcommand, through the installed entry point


@pytest.fixture(scope="module")
def work(installed: Path, edited: Edited) -> Command:
    edited.saved  # noqa: B018 (the folder `vector`)
    return Command(installed, edited.folder)


def test_show_combine_and_compress_work_as_installed(work: Command, edited: Edited, tmp_path: Path) -> None:
    assert work.json("show", "vector")["norm"] == pytest.approx(edited.vector.norm())
    work("combine", "-0.75*hp1 + 0.25*hp1", "hp1=vector", "-o", tmp_path / "combined")
    assert TaskVector.load(tmp_path / "combined").expression == "-0.5*hp1"
    small = work.json("compress", "vector", "--rank", 2, "-o", tmp_path / "small")
    assert small["ranks"] == [2, 2]


def test_compare_prints_cosines_and_draws_them(work: Command, edited: Edited, tmp_path: Path) -> None:
    out = work("compare", "a=vector", "b=vector", "-o", tmp_path / "heat.png")
    assert "+1.0000" in out and (tmp_path / "heat.png").exists()


def test_an_adapter_gets_its_card_and_a_pull_request(
    hub: HubServer, work: Command, edited: Edited, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    work("adapter", "vector", "--rank", 2, "--dense", "drop", "--base", "base", "-o", adapter)
    work("card", adapter, "--base-model", "me/base", "--repo-id", "me/adapter")
    assert "base_model: me/base" in (adapter / "README.md").read_text()
    assert work.json("push", adapter, "me/adapter", "--create-pr")["pull_request"].endswith("/discussions/1")


def test_eval_writes_a_report_at_scale_0(work: Command, edited: Edited, tmp_path: Path) -> None:
    books = ["--forget", "lamps.txt", "--set", "samples=2", "--set", "prompt_length=20", "--set", "answer_length=6"]
    answer = work.json("eval", "base", *books, "-o", tmp_path / "report")
    assert answer["protocol"].startswith("taskvec-v1@")
    assert UnlearningReport.load(tmp_path / "report").scales == (0.0,)
    assert (tmp_path / "report" / "taskvec-command.json").exists()


def test_errors_have_one_sentence_and_their_exit_code(work: Command) -> None:
    assert work("show", "nowhere/at/all", code=1) == "taskvec: there is no folder 'all' at the given path.\n"
    assert "Missing argument" in work("show", code=2)


def test_python_m_hf_taskvec_is_the_same_command(work: Command) -> None:
    run = [sys.executable, "-m", "hf_taskvec", "--version"]
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": str(work.site)}, capture_output=True, text=True)
    assert done.stdout.startswith("taskvec ")


def test_help_imports_nothing_heavy(work: Command) -> None:
    code = (
        "import sys\nfrom hf_taskvec.cli import main\n"
        "try:\n    main(['sweep', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'peft', 'numpy', 'datasets', 'huggingface_hub'}\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & heavy))"
    )
    environment = {**os.environ, "PYTHONPATH": str(work.site)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_commands_and_options_are_completed_in_the_shell(work: Command) -> None:
    words = {"_TASKVEC_COMPLETE": "complete_bash", "COMP_WORDS": "taskvec com", "COMP_CWORD": "1"}
    assert work(**words).split() == ["compare", "combine", "compress"]
    words = {"_TASKVEC_COMPLETE": "complete_bash", "COMP_WORDS": "taskvec apply --sc", "COMP_CWORD": "2"}
    assert work(**words).split() == ["--scale"]
