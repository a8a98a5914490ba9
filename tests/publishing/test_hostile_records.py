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
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from support.edited_model import Edited

from hf_taskvec import TaskVector, combine
from hf_taskvec.cli import main
from hf_taskvec.errors import TaskVectorError
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


def tokens(markdown: str) -> Iterator[Token]:
    body = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    for token in MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(body):
        yield token
        yield from token.children or ()


def shape(markdown: str) -> Counter[str]:
    """How many links, images, headings, cells and blocks of code a text has once it is rendered."""
    kinds = ("link_open", "image", "heading_open", "th_open", "td_open", "fence", "hr", "list_item_open", "code_block")
    return Counter(token.type for token in tokens(markdown) if token.type in kinds)


def assert_harmless(markdown: str, plain: str) -> None:
    """The text renders to the same structure as that of an innocent record, without anything of the stranger's."""
    assert shape(markdown) == shape(plain)
    depth = 0
    for token in tokens(markdown):
        assert not token.type.startswith("html") or token.content == "<br>", token.content
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
