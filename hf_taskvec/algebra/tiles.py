"""Tiles: the runs of rows in which parameters are evaluated, so that no whole parameter is held in fp64."""

from collections.abc import Iterator

from hf_taskvec.algebra.sources import numel

# Elements in a tile: small enough that its fp64 accumulator (4 MiB) stays near a core, large enough that threads work
# in torch and do not wait for each other in Python. Tiles depend on the shape alone, so an expression gives the same
# bits live, streamed, and on any number of threads or processes.
TILE = 1 << 19


def tile_rows(shape: tuple[int, ...]) -> int:
    """How many rows of a parameter make one tile."""
    return max(1, TILE // max(1, numel(shape[1:])))


def tiles_of_shape(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The row ranges of a parameter's tiles; a scalar has one tile of one row.

    >>> list(tiles_of_shape((3, 1 << 19)))
    [(0, 1), (1, 2), (2, 3)]
    """
    rows, step = (shape[0] if shape else 1), tile_rows(shape)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
