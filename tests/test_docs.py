"""The documentation: its Python runs, its links lead somewhere, and the README stays short."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
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


def test_the_guide_has_python_that_runs() -> None:
    runs = [block for block in BLOCK.finditer((ROOT / "docs" / "guide.md").read_text("utf-8")) if not block["note"]]
    assert len(runs) >= 10


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
