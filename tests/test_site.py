"""The documentation as a site: it builds without a warning, and a browser shows it.

`make docs` installs what that takes.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from questions import QUESTIONS, Question
from support.browser import browser, needs_browser

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason='needs pip install "hf-taskvec[docs]"'),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, on this machine alone."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import hf_taskvec.evaluation
    import hf_taskvec.training

    for module in (hf_taskvec.evaluation, hf_taskvec.training):
        page = (site / "reference" / f"{module.__name__.rpartition('.')[2]}.html").read_text("utf-8")
        for name in module.__all__:
            assert re.search(rf"<h2[^>]*>.*?\b{re.escape(name)}\b", page, re.S), name
    commands = (site / "reference" / "command-line.html").read_text("utf-8")
    assert "taskvec forget" in commands and "--write-anyway" in commands


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//", text), page.name


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_page_is_shown_without_an_error(site: Path, address: str, width: int, dark: bool) -> None:
    with browser(width, dark=dark) as page:
        for path in sorted(site.rglob("*.html")):
            if path.name == "404.html":
                continue
            page.get(f"{address}/{path.relative_to(site)}")
            wide, room = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
            assert wide <= room, (path.name, wide, room)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason='needs pip install "hf-taskvec[docs]"')
def test_a_tutorial_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    from tutorials import run

    now, stored = run(path), json.loads(path.read_text("utf-8"))
    for cell, before in zip(now.cells, stored["cells"], strict=True):
        assert output_kinds(cell) == output_kinds(before), cell["source"]


def output_kinds(cell: Any) -> list[str]:
    """What a cell gave. Printed text comes in as many pieces as the kernel's clock makes of it: they count as one."""
    return [kind for kind, _ in itertools.groupby(each["output_type"] for each in cell.get("outputs", []))]


@needs_browser
def test_search_finds_a_page(address: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with browser() as page:
        page.get(address)
        page.find_element(By.CSS_SELECTOR, "input[type=text].md-search__input").send_keys("quantised bases")
        found = "li.md-search-result__item a"
        WebDriverWait(page, 30).until(lambda page: page.find_elements(By.CSS_SELECTOR, found))
        first = page.find_element(By.CSS_SELECTOR, found).get_attribute("href")
        assert "quantised-bases" in first or "choices" in first


def test_there_are_twenty_questions_and_none_takes_more_than_two_clicks() -> None:
    assert len({each.question for each in QUESTIONS}) == 20
    assert all(1 <= len(each.clicks) <= 2 for each in QUESTIONS)


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_twenty_questions_are_answered_within_two_clicks(address: str, width: int) -> None:
    with browser(width) as page:
        wrong = [each.question for each in QUESTIONS if not answers(page, address, each)]
    assert wrong == []


def answers(page: Any, address: str, asked: Question) -> bool:
    """Whether the clicks lead to a page that has the answer; each is on a link that can be seen."""
    from selenium.webdriver.common.by import By

    page.get(f"{address}/index.html")
    for text in asked.clicks:
        links = [link for link in page.find_elements(By.LINK_TEXT, text) if link.is_displayed()]
        if not links:
            return False
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", links[0])
        links[0].click()
    return asked.answer in page.find_element(By.TAG_NAME, "article").text
