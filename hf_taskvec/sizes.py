"""Numbers of bytes, as people write and read them."""

import numbers
import re

from hf_taskvec.errors import BadValueError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_size(size: int | str) -> int:
    """A number of bytes from `"5GB"` and the like.

    >>> parse_size("5GB")
    5000000000
    """
    if isinstance(size, numbers.Integral):  # numpy's integers as well
        nbytes = int(size)
    else:
        text = size.upper() if isinstance(size, str) else ""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)\s*", text)
        if not match or match[2] not in _UNITS:
            raise BadValueError(
                f"{size!r} is not a size. Write it as a whole number of bytes or like '5GB' or '500MB'."
            )
        nbytes = int(float(match[1]) * _UNITS[match[2]])
    if nbytes < 1:
        raise BadValueError(f"{size!r} is not a size: it must be at least one byte.")
    return nbytes


def file_size(nbytes: float) -> str:
    """The size of files: in powers of ten, as disks and the Hub count.

    >>> file_size(2_840_000_000)
    '2.84 GB'
    """
    return f"{nbytes / 10 ** (3 * (power := _power(nbytes, 1000))):.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def memory_size(nbytes: float) -> str:
    """The size of something in memory: in powers of two, as memory is sold.

    >>> memory_size(3.2e9)
    '3.0 GiB'
    """
    power = _power(nbytes, 1024)
    return f"{nbytes / 1024**power:.{min(power, 1)}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def _power(nbytes: float, step: int) -> int:
    """Which unit a size is written in; the largest is the third power, however large the size."""
    power = 0
    while nbytes >= step and power < 3:
        nbytes, power = nbytes / step, power + 1
    return power
