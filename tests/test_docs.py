"""The documentation: its Python runs, its links lead somewhere, and the README stays short."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import HubServer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "docs" / "concepts").glob("*.md")),
]
BLOCK = re.compile(r"^(?P<note><!-- not run: [^\n]+ -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]+)?\)")


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {"#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that the pages make, made once."""
    from hf_taskvec.experiments.playground import make_playground

    return make_playground(tmp_path_factory.mktemp("made") / "play", progress=False).base.parent


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a process of its own and an empty folder, but for the playground that a page makes.

    What says that it needs more than that is compiled only.
    """
    blocks = list(BLOCK.finditer(page.read_text("utf-8")))
    for block in blocks:
        compile(block["code"], page_name(page), "exec")
    code = "\n".join(block["code"] for block in blocks if not block["note"])
    if not code:
        return
    if 'make_playground("play")' in code:
        shutil.copytree(request.getfixturevalue("play"), tmp_path / "play")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path.read_text("utf-8")), target + anchor


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_row_of_a_table_has_the_cells_of_its_head(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    for table in re.findall(r"^\|.+\n\|[-:| ]+\|\n(?:\|.*\n?)+", text, re.M):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert set(cells) == {cells[0]}, table.splitlines()[
            next(n for n, count in enumerate(cells) if count != cells[0])
        ]


def commands(text: str) -> list[list[str]]:
    """The commands of a page's shell blocks, word by word; without comments, and without those that leave words out."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):  # a variable before the command
                words = words[1:]
            words = words[: words.index(">")] if ">" in words else words
            if words and not any("…" in word for word in words):
                found.append(words)
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_the_commands_of_a_page_exist_and_take_their_options(page: Path) -> None:
    """None is run here: most need models of one's own, or hours. Parsed, each would begin."""
    import typer

    from hf_taskvec.cli.app import app
    from hf_taskvec.cli.arguments import protect_expression

    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for words in commands(page.read_text("utf-8")):
        program, *rest = words
        if program == "accelerate" or words[:2] == ["torchrun", "--nproc-per-node"]:
            scripts = [i for i, word in enumerate(words) if word.endswith(".py") or word == "hf_taskvec"]
            program, *rest = ["taskvec" if words[scripts[0]] == "hf_taskvec" else "python", *words[scripts[0] :]]
            rest = rest[1:] if program == "taskvec" else rest
        if program == "make":
            assert not rest or rest[0] in targets, words
        elif program == "taskvec" and rest and not rest[0].startswith("-"):
            name, *given = protect_expression(rest)
            group: Any = typer.main.get_command(app)
            group.commands[name].make_context(name, given)  # raises what the command would say
        elif program == "python" and rest[0].endswith(".py") and rest[0].startswith(("recipes/", "tests/", "docs/")):
            script = (ROOT / rest[0]).read_text("utf-8")
            known = options_of(rest[0])
            for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
                assert option in known or f'"{option}"' in script, (words, option)


def options_of(recipe: str) -> set[str]:
    """The flags of a recipe that are the fields of its config."""
    import dataclasses

    from hf_taskvec.experiments.multitask.multitask_config import MultitaskConfig
    from hf_taskvec.experiments.transfer.transfer_config import TransferConfig
    from hf_taskvec.experiments.unlearning.baselines_config import BaselinesConfig
    from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig

    configs = {"unlearn": UnlearnConfig, "baselines": BaselinesConfig, "multitask": MultitaskConfig}
    config = (configs | {"transfer": TransferConfig}).get(Path(recipe).stem)
    fields = () if config is None else dataclasses.fields(config)
    names = [each.name.replace("_", "-") for each in fields]
    return {"--config", *(f"--{name}" for name in names), *(f"--no-{name}" for name in names)}


# README, line by line, on tiny models.


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what README names: a base, a fine-tune on a book, adapters, a model of all books, two books."""
    import copy

    from peft import LoraConfig, get_peft_model
    from support.tiny_books import STORY, make_books, make_tokenizer, tiny_llama, train

    folder = tmp_path_factory.mktemp("readme")
    tokenizer, books, base = make_tokenizer(), make_books(), tiny_llama(context=1024)
    models = {"base": base, "tuned": train(copy.deepcopy(base), tokenizer, books[:1], 30)}
    models["library"] = train(copy.deepcopy(base), tokenizer, books, 30)
    lora = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    models["lora"] = train(lora, tokenizer, books[1:], 10, lr=1e-2)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    half = len(STORY) // 2
    (folder / "hp1.txt").write_text(STORY[:half], "utf-8")
    (folder / "pp.txt").write_text(STORY[half:].replace("lamps", "boats"), "utf-8")
    return folder


def test_the_readme_s_python_runs_on_a_hub(
    phi: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block says that it needs the Hub: here is one, with a tiny model under each name."""
    from transformers import AutoModelForCausalLM

    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = BLOCK.finditer(text)
    names = {"microsoft/phi-1_5": "base", "me/phi-1_5-hp1": "tuned", "me/phi-1_5-hp2-lora": "lora"}
    for name, folder in (names | {"me/phi-1_5-books": "library"}).items():
        assert f'"{name}"' in block["code"]
        hub.add_repo(name, phi / folder)
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(phi / "library")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exec(compile(block["code"], "README.md", "exec"), {"model": model})
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "adapter").is_dir()
    assert "taskvec.json" in hub.files("me/forget-hp1")


def taskvec(words: list[str]) -> subprocess.CompletedProcess[str]:
    """A command, as it is typed."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "hf_taskvec", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_readme_s_four_commands_run(
    phi: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, on tiny models. These know little of their books: where no λ is chosen, `apply` is told one."""
    for name in ("base", "tuned", "hp1.txt", "pp.txt"):
        (tmp_path / name).symlink_to(phi / name)
    monkeypatch.chdir(tmp_path)
    lines = [words for words in commands((ROOT / "README.md").read_text("utf-8")) if words[0] == "taskvec"]
    assert [words[1] for words in lines] == ["extract", "sweep", "apply", "push"]
    for words in lines:
        done = taskvec(words[1:])
        if words[1] == "apply" and done.returncode == 1:
            assert "no λ" in done.stderr, done.stderr
            done = taskvec([*(word for word in words[1:] if word not in ("--report", "report")), "--scale", "-0.6"])
        assert done.returncode == 0, done.stderr[-3000:]
    assert "model.safetensors" in hub.files("me/forgot")


def test_the_guide_has_python_that_runs() -> None:
    runs = [block for block in BLOCK.finditer((ROOT / "docs" / "guide.md").read_text("utf-8")) if not block["note"]]
    assert len(runs) >= 10


def test_the_schema_of_reports_is_that_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastjsonschema
    from support.made_reports import made_report, made_report_of_edits

    from hf_taskvec.evaluation import UnlearningReport

    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    from schemas import json_schema

    schema = json_schema(UnlearningReport, frozenset({"theory", "controls", "edits", "utility"}))
    assert "λ" in schema["properties"]["scales"]["description"]
    check = fastjsonschema.compile(schema)
    for report in (made_report(0), made_report_of_edits(0, {"-0.5*a": 1.0, "repaired": 2.0}, "repaired")):
        content = json.loads(report.to_json())
        check(content)
        for wrong in ({"scales": ["a"]}, {"choice": 1}, {"books": [{"name": "alice"}]}):
            with pytest.raises(fastjsonschema.JsonSchemaValueException):
                check(content | wrong)
        content.pop("theory")
        check(content)
        content.pop("scores")
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            check(content)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8192


def test_every_file_and_function_that_the_architecture_names_exists() -> None:
    """`package/module.py` is a file, and a name right behind it, as in "`package/module.py` `function`", is in it."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)`(?:\s+`(?:\w+\.)?(\w+)`)?", text)
    assert len(named) >= 40
    for file, name in named:
        path = ROOT / file if file.startswith(("recipes/", "tests/")) else ROOT / "hf_taskvec" / file
        assert path.exists(), file
        if name:
            assert re.search(rf"^\s*(def|class) {name}\b", path.read_text("utf-8"), re.M), f"{file} has no {name}"
