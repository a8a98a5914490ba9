"""`report.html`: one file that shows the report, whatever stands in the texts; in a real browser where there is one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import browser, needs_browser
from support.made_reports import SCALES, around, made_report, made_report_of_edits

from hf_taskvec.errors import MissingNameError
from hf_taskvec.evaluation import UnlearningReport
from hf_taskvec.evaluation.reporting.report_parts import (
    PassageAtReference,
    PassageAtScale,
    PassageResult,
    ReferenceInfo,
    ReferenceScore,
)

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
LINE = "\u2028"
TRUE = "down the rabbit hole she went and never once considered"


def passages(count: int) -> tuple[PassageResult, ...]:
    found = []
    for number in range(count):
        book = ("alice", "looking", "oz")[number % 3]
        texts = {0.0: TRUE, -0.2: "down the hole she went", -0.4: f"a different text {EVIL}", -0.6: ""}
        at = tuple(PassageAtScale(s, texts[s], {"rouge_l": 0.9 + s - number / 1000, "loss": 1 - s}) for s in SCALES)
        never = (PassageAtReference("retrained", "once upon a time she went", {"rouge_l": 0.1, "loss": 4.0}),)
        found.append(PassageResult(f"p{number}", book, "seen", f"prompt {number}{LINE}<b>bold</b>", TRUE, at, never))
    return tuple(found)


def full_report(count: int = 33) -> UnlearningReport:
    plain = made_report(3)
    return replace(
        plain,
        passages=passages(count),
        references=(ReferenceInfo("retrained", "never-seen", 8, ""),),
        reference_scores=tuple(
            ReferenceScore("retrained", book, "seen", "rouge_l", 18, around(value), around(-0.1), None)
            for book, value in (("alice", 0.2), ("looking", 0.8), ("oz", 0.78))
        ),
    )


def block(page: str, opening: str) -> str:
    return page.split(opening, 1)[1].split("</script>", 1)[0]


def test_the_page_holds_the_report_and_its_policy_allows_one_script() -> None:
    report = full_report()
    page = report.to_html({"sentence": EVIL, "heads": ["attack"], "rows": [[EVIL]]})
    data = json.loads(block(page, '<script type="application/json" id="data">'))
    assert data["report"] == json.loads(report.to_json())
    assert data["audit"]["sentence"] == EVIL
    assert page.count("<script") == 2
    digest = base64.b64encode(hashlib.sha256(block(page, "<script>").encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in policy[1]
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page)


def test_names_are_text_in_the_markup() -> None:
    plain = made_report(0)
    assert plain.choice is not None
    report = replace(
        plain,
        books=tuple(replace(book, name=f"{book.name} {EVIL}") for book in plain.books),
        choice=replace(plain.choice, reason=f"made up {EVIL} @data@"),
    )
    page = report.to_html()
    markup = page.split('<script type="application/json"')[0]
    assert "<img" not in markup
    assert "<script" not in markup
    assert "@data@" in markup
    assert "&lt;img" in markup


def test_saving_writes_the_page_beside_the_report(tmp_path: Path) -> None:
    report = full_report()
    report.save(tmp_path, plots=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert (tmp_path / "report.html").read_text("utf-8") == report.to_html()


def test_a_report_is_short_in_a_terminal() -> None:
    expected = "alice (forget), looking (aligned), oz (retain); λ = 0, −0.2, −0.4, −0.6; as if never seen"
    assert repr(full_report()) == f"UnlearningReport({expected})"


def test_scores_are_a_table_and_a_plot_has_a_name() -> None:
    report = full_report()
    table = report.to_pandas()
    assert len(table) == len(report.scores) + len(report.reference_scores)
    row = table[(table.book == "alice") & (table.scale == -0.4) & (table.metric == "rouge_l")].iloc[0]
    assert (row.value, row.role, row.edit) == (report.score("alice", -0.4).value.value, "forget", "−0.4")
    assert set(table[table.scale.isna()].edit) == {"retrained"}
    assert report.figure("scores").axes
    with pytest.raises(MissingNameError, match="no plot 'score'"):
        report.figure("score")


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_from_their_ground() -> None:
    """Text by 4.5 to 1, lines and points of figures by 3 to 1: WCAG 2, level AA."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    style = block(full_report(0).to_html(), "<style>")
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", each)) for each in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    ]
    for colours in schemes:
        for ground in (colours["ground"], colours["panel"]):
            for name in ("text", "faint", "good", "bad", "open"):
                assert contrast(colours[name], ground) >= 4.5, name
            for number in range(7):
                assert contrast(colours[f"c{number}"], ground) >= 3, number
        assert contrast(colours["text"], colours["mark"]) >= 4.5


def opened(folder: Path, report: UnlearningReport, found: Any, audit: dict[str, Any] | None = None) -> None:
    path = folder / "report.html"
    path.write_text(report.to_html(audit), "utf-8")
    found.get(path.as_uri())


@needs_browser
def test_the_slider_moves_the_page_by_keyboard(tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with browser() as page:
        opened(tmp_path, full_report(), page)
        slider = page.find_element(By.ID, "scale")
        shown = page.find_element(By.ID, "scale-value")
        assert shown.text == "−0.4 (chosen)"
        row = "#scores tbody tr:first-child td"
        assert [cell.text for cell in page.find_elements(By.CSS_SELECTOR, row)] == ["0.800", "0.400", "–", "0.200"]
        slider.send_keys(Keys.ARROW_LEFT)
        assert shown.text == "−0.2"
        assert slider.get_attribute("aria-valuetext") == "λ −0.2"
        assert [cell.text for cell in page.find_elements(By.CSS_SELECTOR, row)][1] == "0.600"
        marked = page.find_elements(By.CSS_SELECTOR, "#list li:first-child .texts > div:nth-child(3) mark")
        assert " ".join(each.text for each in marked) == "down the hole she went"
        slider.send_keys(Keys.HOME)
        assert shown.text == "0"
        assert len(page.find_elements(By.CSS_SELECTOR, "#list li:first-child .texts > div")) == 3


@needs_browser
def test_passages_are_filtered_sorted_and_paged(tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    with browser() as page:
        opened(tmp_path, full_report(), page)
        count = page.find_element(By.ID, "count")
        assert count.text == "11 passages, page 1 of 2"
        page.find_element(By.ID, "after").click()
        assert count.text == "11 passages, page 2 of 2"
        assert len(page.find_elements(By.CSS_SELECTOR, "#list li")) == 1
        Select(page.find_element(By.ID, "book")).select_by_value("")
        assert count.text == "33 passages, page 1 of 4"
        Select(page.find_element(By.ID, "sort")).select_by_value("low")
        assert page.find_element(By.CSS_SELECTOR, "#list li .prompt").text.startswith("oz: prompt 32")
        page.find_element(By.ID, "find").send_keys("prompt 17")
        assert count.text == "1 passage, page 1 of 1"
        assert "<b>bold</b>" in page.find_element(By.CSS_SELECTOR, "#list li .prompt").text


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (390, True)])
def test_hostile_texts_are_shown_as_text_and_nothing_overflows(tmp_path: Path, width: int, dark: bool) -> None:
    from selenium.webdriver.common.by import By

    report = full_report()
    report = replace(report, books=tuple(replace(book, fingerprint=EVIL) for book in report.books))
    audit = {"sentence": EVIL, "heads": ["attack", "says"], "rows": [[EVIL, "still known"]]}
    with browser(width, dark=dark) as page:
        opened(tmp_path, report, page, audit)
        assert page.title == "Unlearning report: alice"
        assert EVIL in page.find_element(By.ID, "list").text
        assert page.find_element(By.CSS_SELECTOR, "#audit p").text == EVIL
        assert page.find_elements(By.TAG_NAME, "img") == []
        wide, room = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= room


@needs_browser
def test_it_prints_dark_on_white_whatever_the_screen_shows(tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    with browser(dark=True) as page:
        opened(tmp_path, full_report(), page)
        colour = "return getComputedStyle(document.body).backgroundColor"
        assert page.execute_script(colour) == "rgb(23, 25, 28)"
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert page.execute_script(colour) == "rgb(255, 255, 255)"
        lines = "return getComputedStyle(document.documentElement).getPropertyValue('--c6').trim()"
        assert page.execute_script(lines) == "#000000"
        assert not any(each.is_displayed() for each in page.find_elements(By.TAG_NAME, "button"))
        assert page.find_element(By.ID, "scores").is_displayed()
        printed = page.execute_cdp_cmd("Page.printToPDF", {})["data"]
        assert base64.b64decode(printed).startswith(b"%PDF")


@needs_browser
def test_named_edits_and_a_report_without_passages_are_shown(tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    report = made_report_of_edits(0, {"-0.5*a": 1.0, "repaired": 2.0}, "repaired")
    with browser() as page:
        opened(tmp_path, report, page)
        assert page.find_element(By.CSS_SELECTOR, "label[for=scale]").text == "Edit = repaired (chosen)"
        assert not page.find_element(By.ID, "passages").is_displayed()
