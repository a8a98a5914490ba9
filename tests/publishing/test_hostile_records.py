"""A stranger's files: what their texts can become on a card, in a report, on a terminal and in a notebook.

Whoever writes a `taskvec.json` can write its checksum, too. Each hostile text is put into each field that a file has a
text in, and shown in each way that we show it: it is refused, or it is shown as the text that it is.
"""

import ast
import html.parser
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from support.edited_model import Edited

from hf_taskvec import TaskVector, combine
from hf_taskvec.cli import main
from hf_taskvec.errors import BadValueError, CorruptFileError, TaskVectorError
from hf_taskvec.evaluation import UnlearningReport
from hf_taskvec.files.vector_schema import checksum
from hf_taskvec.publishing.model_card import card_for
from hf_taskvec.publishing.written_folder import open_artifact

MARK = "hostile"
HOSTILE = {
    "code span": f"{MARK}`; import os; os.system('x')`",
    "fence": f"{MARK}\n```\n[x](https://{MARK}.example)\n```python\n",
    "fence on one line": f"``` {MARK} ```",
    "pipes": f"{MARK} | a | b |",
    "heading": f"{MARK}\n\n# {MARK}\n\n- {MARK}",
    "heading on one line": f"# {MARK}",
    "script": f"<script>{MARK}</script>",
    "image tag": f"<img src=x onerror={MARK}>",
    "link": f"[{MARK}](javascript:alert)",
    "closing link": f"x](https://{MARK}.example/)",
    "image": f"![{MARK}](https://{MARK}.example/x.png)",
    "autolink": f"<https://{MARK}.example>",
    "bare link": f"see https://{MARK}.example or www.{MARK}.example",
    "mail": f"{MARK}@{MARK}.example",
    "jinja": "{{ c.metadata }}{% raw %}" + MARK,
    "yaml": f"{MARK}: x\n---\nlicense: {MARK}\n",
    "yaml on one line": f"- {MARK}: x # &a *b !!python/object",
    "terminal link": f"\x1b]8;;https://{MARK}.example\x1b\\{MARK}\x1b]8;;\x1b\\",
    "terminal title": f"\x1b]0;{MARK}\x07\x9b31m",
    "bidi": f"{MARK}\u202e\u2066\u200b\ufeff",
    "end of a string": f"{MARK}'); import os; ('",
    "end of a double string": f'{MARK}"); import os; ("',
    "comment": f"tuned  # {MARK}",
    "call": f"__import__('os').system('{MARK}')",
    "formula": f"$$ \\href{{https://{MARK}.example}}{{x}} $$",
    "rich markup": f"[red]{MARK}[/red][link=https://{MARK}.example]x[/link]",
    "emphasis": f"*{MARK}* __{MARK}__ ~~{MARK}~~",
    "long": MARK * 30_000,
}
# Addresses that a template or a Hub id makes; others are the stranger's.
OURS = re.compile(r"https://huggingface\.co/[\w./-]+|report/[\w.]+|https://arxiv\.org/[\w./-]+")


def fields(record: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each text in a record, and of each key of a mapping that a file chooses."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from fields(value, (*path, key))
    elif isinstance(record, list):
        for number, value in enumerate(record):
            yield from fields(value, (*path, number))
    elif isinstance(record, str):
        yield path


def planted(record: dict[str, Any], path: tuple[Any, ...], text: str) -> dict[str, Any]:
    changed = json.loads(json.dumps(record))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = text
    return changed


# What a renderer makes of it


RENDERER = MarkdownIt("gfm-like", {"html": True, "linkify": False})


@lru_cache(maxsize=8)  # the innocent texts, with which all others are compared, are among the last ones
def tokens(markdown: str) -> tuple[Token, ...]:
    body = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    return tuple(each for token in RENDERER.parse(body) for each in (token, *(token.children or ())))


def shape(markdown: str) -> Counter[str]:
    """How many links, images, headings, cells and blocks of code a text has once it is rendered."""
    kinds = ("link_open", "image", "heading_open", "th_open", "td_open", "fence", "hr", "list_item_open", "code_block")
    return Counter(token.type for token in tokens(markdown) if token.type in kinds)


def markup(markdown: str) -> list[str]:
    """What stands in a text as HTML, in its order."""
    return [token.content for token in tokens(markdown) if token.type.startswith("html")]


#: what the library itself writes in HTML: a line's end, and tables that are folded
OUR_MARKUP = ("<br>", "<details><summary>With intervals and changes</summary>", "</details>")


def assert_harmless(markdown: str, plain: str) -> None:
    """The text renders to the same structure as that of an innocent record, without anything of the stranger's."""
    assert shape(markdown) == shape(plain)
    assert markup(markdown) == markup(plain)
    depth = 0
    for token in tokens(markdown):
        assert not token.type.startswith("html") or token.content.strip() in OUR_MARKUP, token.content
        address = token.attrs.get("href") or token.attrs.get("src")
        assert address is None or OURS.fullmatch(str(address)), address
        depth += {"link_open": 1, "link_close": -1}.get(token.type, 0)
        if token.type == "text" and depth == 0:  # what GitHub and the Hub would make a link of by themselves
            assert not re.search(r"://|www\.|\w@\w", token.content), token.content
    assert visible(markdown)


def assert_safe_code(markdown: str, labels: set[str]) -> None:
    """Blocks of Python call nothing but what the templates call, and assign nothing but labels."""
    known = {"TaskVector", "combine", "PeftModel", "AutoModelForCausalLM", "AutoTokenizer", "re", "model", "vector"}
    for token in tokens(markdown):
        if token.type != "fence" or token.info != "python":
            continue
        for node in ast.walk(ast.parse(token.content)):
            if isinstance(node, ast.Name):
                assert node.id in known | labels | {"tokenizer"}, token.content
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert getattr(node, "module", None) in ("hf_taskvec", "peft", "transformers"), token.content


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.add(tag)


def assert_harmless_html(text: str) -> None:
    tags = _Tags()
    tags.feed(text)
    assert tags.found <= {
        "div",
        "p",
        "b",
        "br",
        "code",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "ul",
        "li",
        "span",
    }


def visible(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


# Vectors


@pytest.fixture(scope="module")
def saved(edited: Edited, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vector whose record has a text in every place that a record can have one."""
    a = TaskVector.from_finetuned(edited.pair.base, edited.pair.tuned, name="a").filter(include="*norm*")
    folder = tmp_path_factory.mktemp("hostile") / "vector"
    combine([a, (2 * a).named("b")], "ties", density=0.5).save(folder)
    return folder


@pytest.fixture(scope="module")
def innocent(saved: Path) -> str:
    return card_for(open_artifact(saved), repo_id="me/vector")


def with_each_text(saved: Path, text: str, folder: Path) -> Iterator[Path]:
    """Folders that hold the vector with the text in one place of its record after another, under a true checksum."""
    record = json.loads((saved / "taskvec.json").read_text())
    places = [path for path in fields(record) if path[0] in ("provenance", "library")]
    assert len(places) > 12
    for number, path in enumerate(places):
        changed = planted(record, path, text)
        changed["checksum"] = checksum(changed)
        shutil.copytree(saved, folder / str(number))
        (folder / str(number) / "taskvec.json").write_text(json.dumps(changed))
        yield folder / str(number)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_of_a_vectors_record_becomes_more_than_a_text(
    saved: Path, innocent: str, tmp_path: Path, name: str
) -> None:
    shown = 0
    for folder in with_each_text(saved, HOSTILE[name], tmp_path):
        try:
            vector = TaskVector.load(folder)
            card = card_for(open_artifact(folder), repo_id="me/vector")
        except TaskVectorError as error:
            assert visible(str(error)) and len(str(error)) < 2000
            continue
        shown += 1
        assert visible(repr(vector))
        assert_harmless_html(vector._repr_html_())
        assert_harmless(card, innocent)
        assert_safe_code(card, {origin.label for origin in vector.provenance.origins})
        assert yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1])["library_name"] == "hf_taskvec"
    assert shown or not visible(HOSTILE[name]) or name == "long"  # a model may be called anything that can be seen


@pytest.mark.parametrize("name", ["terminal link", "terminal title", "bidi", "rich markup", "fence"])
def test_nothing_but_what_can_be_seen_reaches_the_terminal(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for folder in with_each_text(saved, HOSTILE[name], tmp_path):
        for arguments in (["show", folder], ["show", folder, "--json"]):
            with pytest.raises(SystemExit):
                main([str(each) for each in arguments])
            out, err = capsys.readouterr()
            assert visible(out) and visible(err), arguments


# Merged models and adapters


@pytest.fixture(scope="module")
def written(edited: Edited, saved: Path) -> dict[str, Path]:
    """A merged model and an adapter, by their records, with their weights left out: a card reads none."""
    vector = TaskVector.load(saved)
    small = edited.vector.filter(include="*proj*").compress(rank=1)
    return {
        "taskvec_apply.json": vector.apply(edited.pair.base, saved.parent / "model", scale=-0.5),
        "taskvec_adapter.json": small.to_adapter(saved.parent / "adapter", base=edited.pair.base, scale=-1),
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_of_a_models_or_an_adapters_record_becomes_more_than_a_text(
    written: dict[str, Path], tmp_path: Path, name: str
) -> None:
    for file, folder in written.items():
        innocent = card_for(open_artifact(folder), repo_id="me/x")
        record = json.loads((folder / file).read_text())
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        for path in fields(record):
            (copy / file).write_text(json.dumps(planted(record, path, HOSTILE[name])))
            try:
                artifact = open_artifact(copy)
                card = card_for(artifact, repo_id="me/x")
            except TaskVectorError as error:
                assert visible(str(error)) and len(str(error)) < 2000
                continue
            assert_harmless(card, innocent)
            assert_safe_code(card, {origin.label for origin in artifact.provenance.origins})


def test_a_command_that_is_none_of_ours_is_not_shown(written: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written["taskvec_apply.json"], tmp_path / "model"))
    for commands in (
        [["rm", "-rf", "x"]],
        [["taskvec", "apply\n```\n# heading"]],
        [["taskvec", "\x1b]0;x\x07"]],
        [["taskvec", 3]],
        "taskvec",
        [[]],
    ):
        (folder / "taskvec-command.json").write_text(json.dumps({"commands": commands}))
        assert "Written by:" not in card_for(open_artifact(folder), repo_id="me/x"), commands
    (folder / "taskvec-command.json").write_text(json.dumps({"commands": [["taskvec", "apply", "a; rm -rf x", ""]]}))
    assert "taskvec apply 'a; rm -rf x' ''" in card_for(open_artifact(folder), repo_id="me/x")


# Reports


@pytest.fixture(scope="module")
def reported(edited: Edited, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the report is of."""
    return edited.vector.apply(edited.pair.base, tmp_path_factory.mktemp("reported") / "model", scale=-0.5)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_of_a_report_becomes_more_than_a_text(edited: Edited, reported: Path, name: str) -> None:
    artifact = open_artifact(reported)
    plain = replace(edited.report, passages=())
    innocent_text, innocent_card = plain.to_markdown(), card_for(artifact, repo_id="me/x", report=plain)
    record = json.loads(plain.to_json())
    places = [path for path in fields(record) if path[0] in ("choice", "versions", "settings", "model", "references")]
    places += [("metrics", 0, "definition"), ("protocol", "name")]
    texts = [json.dumps(planted(record, path, HOSTILE[name])) for path in places]
    # A book's name stands in many places.
    texts.append(json.dumps(record).replace(json.dumps("lamps"), json.dumps(HOSTILE[name])))
    shown = 0
    for text in texts:
        try:
            report = UnlearningReport.from_dict(json.loads(text))
            card = card_for(artifact, repo_id="me/x", report=report)
        except TaskVectorError as error:
            assert visible(str(error))
            continue
        shown += 1
        assert_harmless(report.to_markdown(), innocent_text)
        assert_harmless(card, innocent_card)
        assert_harmless_html(report._repr_html_())
    assert shown > 3
    figures = UnlearningReport.from_dict(json.loads(texts[-1])).figures() if name in ("formula", "pipes") else {}
    for figure in figures.values():
        figure.canvas.draw()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("books", 0, "role"), "<script>"),
        (("books", 0, "name"), 3),
        (("scales",), "0"),
        (("metrics", 0, "name"), "unknown"),
        (("choice", "scale"), "0"),
        (("settings", "level"), True),
        (("scores",), {}),
        (("versions",), []),
    ],
)
def test_a_report_with_a_value_of_another_type_is_refused(edited: Edited, path: tuple[Any, ...], value: Any) -> None:
    record = json.loads(replace(edited.report, passages=()).to_json())
    with pytest.raises(CorruptFileError):
        UnlearningReport.from_dict(planted(record, path, value))


# Vectors of ours


def test_a_vector_cannot_be_given_a_name_that_is_no_variables(edited: Edited) -> None:
    for name in ("epoch-1", "a b", "", "1", "lambda", "combine", "a`", "\x1b"):
        with pytest.raises(BadValueError, match="cannot name a vector"):
            TaskVector.from_finetuned(edited.pair.base, edited.pair.tuned, name=name)
        with pytest.raises(BadValueError, match="cannot name a vector"):
            edited.vector.named(name)


def test_a_vector_that_was_once_called_otherwise_is_read_under_a_similar_name(saved: Path, tmp_path: Path) -> None:
    """As training called them, `epoch-1`, before names were checked."""
    changed = json.loads((saved / "taskvec.json").read_text())
    renamed = re.sub(r"\ba\b(?=[,)\"])", "epoch-1", json.dumps(changed["provenance"]))
    changed["provenance"] = json.loads(renamed)
    assert "epoch-1" in json.dumps(changed["provenance"]["weights"])
    changed["checksum"] = checksum(changed)
    shutil.copytree(saved, tmp_path / "old")
    (tmp_path / "old" / "taskvec.json").write_text(json.dumps(changed))
    vector, before = TaskVector.load(tmp_path / "old"), TaskVector.load(saved)
    assert vector.expression == re.sub(r"\ba\b", "epoch_1", before.expression)
    assert vector.fingerprint == before.fingerprint


def test_a_folders_name_may_hold_anything(edited: Edited, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(edited.pair.tuned, tmp_path / "a\x1b[31m\nb|<b>`"))
    vector = TaskVector.from_finetuned(edited.pair.base, odd).filter(include="*norm*")
    vector.save(tmp_path / "v")
    again = TaskVector.load(tmp_path / "v")
    assert again.expression == vector.expression and visible(repr(again))
    assert r"a\x1b[31m\nb|<b>`" in repr(again)
