"""Sizes as people write them, and as they read them."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_taskvec.errors import BadValueError
from hf_taskvec.sizes import file_size, memory_size, parse_size


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("500 mb", 5 * 10**8),
        (" 1.5KB ", 1500),
        ("2GiB", 2 * 2**30),
        ("3MiB", 3 * 2**20),
        ("1TB", 10**12),
        ("7", 7),
        ("7B", 7),
        (7, 7),
        (numpy.int64(10**9), 10**9),
    ],
)
def test_a_size_is_read(written: int | str, expected: int) -> None:
    assert parse_size(written) == expected


@pytest.mark.parametrize("written", ["", "GB", "5 XB", "-5GB", "five", "1e9", "5GB5", 1.5, None, "1TIB"])
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(BadValueError, match="is not a size"):
        parse_size(written)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", [0, -1, "0", "0.4B"])
def test_less_than_a_byte_is_refused(written: int | str) -> None:
    with pytest.raises(BadValueError, match="at least one byte"):
        parse_size(written)


def test_files_are_counted_in_powers_of_ten_and_memory_in_powers_of_two() -> None:
    assert [file_size(n) for n in (0, 999, 1000, 2_840_000_000, 5 * 10**13)] == [
        "0 B", "999 B", "1 kB", "2.84 GB", "5e+04 GB"
    ]  # fmt: skip
    assert [memory_size(n) for n in (0, 1023, 1024, 3 * 2**20, 3.2e9, 2**42)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "3.0 MiB", "3.0 GiB", "4096.0 GiB"
    ]  # fmt: skip


@given(st.integers(1, 10**12))
def test_what_is_written_can_be_read_again(nbytes: int) -> None:
    """To the digits that are written: three for files, one after the point for memory."""
    assert parse_size(f"{nbytes}B") == parse_size(str(nbytes)) == nbytes
    if "e+" not in file_size(nbytes):
        assert parse_size(file_size(nbytes)) == pytest.approx(nbytes, rel=5.1e-3)
    written = memory_size(nbytes).replace("bytes", "B")
    assert parse_size(written) == pytest.approx(nbytes, rel=0.051)
