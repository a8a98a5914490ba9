"""How every plot of the library looks, and how it becomes files.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers and dashes differ as well.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_taskvec.errors import UnsupportedError

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


def look(i: int) -> dict[str, Any]:
    """Colour, marker and dashes of the i-th line of a plot."""
    return {"color": COLOURS[i % 7], "marker": _MARKERS[i % 7], "linestyle": _DASHES[i % 7]}


@contextmanager
def styled() -> Iterator[None]:
    """The library's look, for figures that are made or saved inside the block."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib: pip install 'hf-taskvec[plots]', or leave the plots out"
        ) from error
    with matplotlib.rc_context(_STYLE):
        yield


def render(pages: "Mapping[str, Figure] | Mapping[str, Callable[[], Figure]]") -> dict[str, bytes]:
    """Every figure, or what draws it, as PNG and SVG, by file name: the same bytes for the same figure."""
    files = {}
    # The renderers are asked for directly: no window system, and no state of pyplot is touched.
    with styled():
        for name, page in pages.items():
            figure = page() if callable(page) else page
            for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
                files[f"{name}.{kind}"] = buffer.getvalue()
    return files
