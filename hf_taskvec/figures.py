"""How every plot of the library looks, and how it becomes files.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers and dashes differ as well.
"""

import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_taskvec import atomic
from hf_taskvec.errors import BadValueError, OutputError, UnsupportedError
from hf_taskvec.escaping import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)))
_STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "hf_taskvec",
}
# Formats of files, and what keeps the time and matplotlib's version out of them: the same figure gives the same bytes.
_FORMATS: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}}


class Plottable(ABC):
    """A result that can be drawn: `figure()` gives the figure, and `plot(output)` writes it to a file."""

    @abstractmethod
    def figure(self) -> "Figure":
        """Draw the result.

        Returns:
            `matplotlib.figure.Figure`: The figure; a notebook shows it, and it can be changed before it is saved.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.

        """

    def plot(self, output: str | Path) -> Path:
        """Draw the result into a file.

        Args:
            output (`str` or `Path`):
                The file to write; its name ends in `.png` or `.svg`. Folders that do not exist are made.

        Returns:
            `Path`: The file that was written.

        Raises:
            `BadValueError`: If the name ends in something else.
            `OutputError`: If the file cannot be written.
            `UnsupportedError`: If matplotlib is not installed.

        """
        return save_figure(self.figure, output)


def look(i: int) -> dict[str, Any]:
    """Colour, marker and dashes of the i-th line of a plot."""
    return {"color": COLOURS[i % 7], "marker": _MARKERS[i % 7], "linestyle": _DASHES[i % 7]}


def literal(name: str) -> str:
    r"""The name of a book, a model or a vector in a plot, where matplotlib takes what is between two `$` for a formula.

    >>> print(literal("$100 and $200"))
    \$100 and \$200
    """
    return visible(name).replace("$", r"\$")


def new_figure(size: tuple[float, float], layout: str | None = "constrained") -> "Figure":
    """An empty figure that draws itself in a notebook, without pyplot's state.

    Args:
        size (`tuple[float, float]`):
            Its width and height in inches.
        layout (`str`, *optional*, defaults to `"constrained"`):
            How matplotlib places what is in it.

    Returns:
        `matplotlib.figure.Figure`: The figure.

    Raises:
        `UnsupportedError`: If matplotlib is not installed.

    """
    return _figure_class()(figsize=size, layout=layout)


@cache
def _figure_class() -> Any:
    _matplotlib()
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure that a notebook shows."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            with styled(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Glyph .* missing from font")
                self.savefig(buffer, format="png", dpi=100, metadata=_FORMATS["png"])
            return buffer.getvalue()

    return NotebookFigure


@contextmanager
def styled() -> Iterator[None]:
    """The library's style for figures that are made inside the block, whatever style is set for matplotlib.

    It also decorates a function that makes figures: `@styled()`.
    """
    with _matplotlib().rc_context(_STYLE):
        yield


def render(pages: "Mapping[str, Figure] | Mapping[str, Callable[[], Figure]]") -> dict[str, bytes]:
    """Every figure as PNG and SVG, by file name: the same bytes for the same figure.

    Args:
        pages (`Mapping[str, Figure]` or `Mapping[str, Callable]`):
            For each name of a file, without its ending, the figure, or what draws it.

    Returns:
        `dict[str, bytes]`: The content of each file.

    Raises:
        `UnsupportedError`: If matplotlib is not installed.

    """
    files = {}
    # The renderers are called directly: no window system is needed, and no state of pyplot is touched.
    with styled(), warnings.catch_warnings():
        # What a model wrote may hold any character; a box stands for one that the font lacks.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        for name, page in pages.items():
            figure = page() if callable(page) else page
            for kind, metadata in _FORMATS.items():
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
                files[f"{name}.{kind}"] = buffer.getvalue()
    return files


def pixels(figure: "Figure") -> Any:
    """A figure as an array of its height, its width and three colours, as trackers take it.

    Args:
        figure (`matplotlib.figure.Figure`):
            The figure.

    Returns:
        `numpy.ndarray`: Of bytes.

    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def save_figure(make: "Callable[[], Figure]", output: str | Path) -> Path:
    """Draw a figure into one file, a PNG or an SVG by the ending of its name; see `Plottable.plot`."""
    output = Path(output)
    kind = output.suffix.removeprefix(".").lower()
    if kind not in _FORMATS:
        raise BadValueError(f"{output.name!r} is no name for a plot: it must end in .png or .svg.")
    # Both formats are made: a figure's layout changes a little when it is drawn again, and files of one name match.
    data = render({"figure": make})[f"figure.{kind}"]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(output, data)
    except OSError as error:
        raise OutputError(f"{output.name} cannot be written ({error.strerror or error}).") from None
    return output


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib: pip install 'hf-taskvec[plots]', or leave the plots out"
        ) from error
    return matplotlib
