"""Pages of tables and figures: what is added is text, whatever stands in it; a browser shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import browser, needs_browser

from hf_taskvec.errors import OutputError
from hf_taskvec.figures import new_figure, render
from hf_taskvec.html_page import HtmlPage

EVIL = "</title></style><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def evil_page() -> HtmlPage:
    page = HtmlPage(EVIL)
    page.add_heading(EVIL)
    page.add_text(EVIL, "what `code` is, and \\_this\\_", f"`{EVIL}`")
    page.add_lines([EVIL])
    page.add_table([EVIL, "x"], [[EVIL, 1.5], ["a" * 300, 2]])
    figure = new_figure((4, 2))
    figure.subplots().plot([1, 2])
    page.add_picture(render({"a": figure})["a.png"], EVIL)
    return page


def test_all_is_text() -> None:
    found = evil_page().render()
    assert "<script" not in found and "<img src=x" not in found
    assert found.count("&lt;script&gt;") == 10  # the title twice, and the words of the picture
    assert "what <code>code</code> is, and _this_" in found
    assert "script-src" not in found and "default-src 'none'" in found


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        HtmlPage("x").save(tmp_path / "file" / "page.html")


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_shows_it(tmp_path: Path, width: int, dark: bool) -> None:
    from selenium.webdriver.common.by import By

    path = evil_page().save(tmp_path / "page.html")
    with browser(width, dark=dark) as page:
        page.get(path.as_uri())
        assert page.title == EVIL
        (picture,) = page.find_elements(By.TAG_NAME, "img")
        assert picture.get_property("naturalWidth") > 100 and picture.get_attribute("alt") == EVIL
        wide, room = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= room
