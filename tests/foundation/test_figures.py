"""Figures become files: in the library's style, the same bytes each time, and whole or not at all."""

import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from hf_taskvec.errors import BadValueError, OutputError, UnsupportedError
from hf_taskvec.figures import Plottable, look, new_figure, render, save_figure, styled


def line() -> Figure:
    figure = Figure(figsize=(2, 2))
    figure.subplots().plot([1, 2], [2, 1], label="a line", **look(0))
    return figure


class Line(Plottable):
    def figure(self) -> Figure:
        return line()


def test_the_same_figure_gives_the_same_png_and_svg() -> None:
    files = render({"one": line, "two": line})
    assert set(files) == {"one.png", "one.svg", "two.png", "two.svg"}
    assert files["one.png"] == files["two.png"] and files["one.png"].startswith(b"\x89PNG")
    assert files["one.svg"] == files["two.svg"] and b"<svg" in files["one.svg"]


@pytest.mark.parametrize("name", ["line.png", "line.svg", "LINE.PNG"])
def test_the_ending_of_the_name_chooses_the_format(tmp_path: Path, name: str) -> None:
    output = Line().plot(str(tmp_path / "new" / name))
    assert output == tmp_path / "new" / name
    assert output.read_bytes() == render({"line": line})[f"line{output.suffix.lower()}"]


def test_a_plot_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for name in ("line", "line.jpeg"):
        with pytest.raises(BadValueError, match=r"must end in \.png or \.svg"):
            save_figure(line, tmp_path / name)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"line\.png cannot be written"):
        save_figure(line, tmp_path / "file" / "line.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_returned_figure_has_the_style_of_a_saved_one() -> None:
    """And the caller's own settings stay as they are."""
    with matplotlib.rc_context({"font.size": 30}):
        axes = styled()(line)().axes[0]
        assert matplotlib.rcParams["font.size"] == 30
    assert not axes.spines["top"].get_visible() and axes.xaxis.label.get_fontsize() == 11
    assert line().axes[0].spines["top"].get_visible()


def test_what_to_install_is_said_where_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for use in (styled()(line), lambda: render({"line": line}), lambda: save_figure(line, tmp_path / "line.png")):
        with pytest.raises(UnsupportedError, match=r"pip install 'hf-taskvec\[plots\]'"):
            use()


def test_a_character_that_the_font_lacks_is_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    def texts() -> Figure:
        figure = Figure(figsize=(2, 2))
        figure.text(0, 0, "\N{NKO LETTER RRA}\N{BRAILLE PATTERN DOTS-2348}")  # what an untrained model may write
        return figure

    assert render({"texts": texts})["texts.png"].startswith(b"\x89PNG")
    assert not [each for each in recwarn if "Glyph" in str(each.message)]


def test_a_figure_draws_itself_in_a_notebook() -> None:
    figure = new_figure((3, 2))
    figure.subplots().plot([1, 2])
    picture = figure._repr_png_()
    assert picture.startswith(b"\x89PNG")
    assert "pyplot" not in str(type(figure.canvas))
