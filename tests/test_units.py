"""Units: where bytes become GiB or GB, and counts become words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.units import (
    GIB,
    KIB,
    MIB,
    parse_count,
    show_bytes,
    show_count,
    show_seconds,
    to_bytes,
)


def test_binary_and_decimal_units() -> None:
    assert (KIB, MIB, GIB) == (1024, 1024**2, 1024**3)
    assert to_bytes(1, "GiB") - to_bytes(1, "GB") == 73_741_824


@pytest.mark.parametrize(
    ("value", "unit", "nbytes"),
    [
        (80, "GB", 80 * 10**9),
        (80, "GiB", 80 * 2**30),
        (81559, "MiB", 85_520_809_984),
        (3.35, "TB/s", 3_350_000_000_000),
        (900, "GB/s", 900 * 10**9),
        (1, "B", 1),
        (0.5, "KiB", 512),
    ],
)
def test_to_bytes(value: float, unit: str, nbytes: int) -> None:
    assert to_bytes(value, unit) == nbytes
    assert isinstance(to_bytes(value, unit), int)


@pytest.mark.parametrize("unit", ["", "gb", "Gb", "G", "GB/m", "GFLOP/s", "KB "])
def test_unknown_units_are_no_bytes(unit: str) -> None:
    with pytest.raises(KeyError):
        to_bytes(1, unit)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7.5B", 7_500_000_000),
        ("7500000000", 7_500_000_000),
        ("7_500_000_000", 7_500_000_000),
        ("7,500,000,000", 7_500_000_000),
        ("350M", 350_000_000),
        ("1T", 10**12),
        ("1.5k", 1500),
        (" 7b ", 7 * 10**9),
        ("7 B", 7 * 10**9),
        ("0", 0),
        ("1.0", 1),
        ("0.1B", 10**8),
        ("6.738415616B", 6_738_415_616),
        ("1.7B", 1_700_000_000),
    ],
)
def test_parse_count(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "B",
        "-1",
        "+1",
        "1.5",
        "1e9",
        "1.",
        ".5B",
        "7.5Q",
        "7BB",
        "7.5.5B",
        "nan",
        "inf",
        "٣B",
        "0x10",
        "1.2345K",
        "_1",
        "B7",
    ],
)
def test_what_is_no_count(text: str) -> None:
    assert parse_count(text) is None


@given(st.integers(0, 10**18))
def test_parse_count_reads_every_integer(number: int) -> None:
    assert parse_count(str(number)) == parse_count(f"{number:,}") == parse_count(f"{number:_}") == number


@given(st.text())
def test_parse_count_never_fails(text: str) -> None:
    count = parse_count(text)
    assert count is None or count >= 0


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (2**30, "1.00 GiB"),
        (14_473_887_744, "13.48 GiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1024.00 TiB"),
        (-(2**30), "-1.00 GiB"),
        (-5, "-5 B"),
    ],
)
def test_show_bytes(nbytes: int, shown: str) -> None:
    assert show_bytes(nbytes) == shown


@given(st.integers(0, 2**60))
def test_show_bytes_is_near(nbytes: int) -> None:
    value, unit = show_bytes(nbytes).split()
    assert abs(to_bytes(float(value), unit) - nbytes) <= max(nbytes / 150, 0)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(999, "999"), (1000, "1.00 K"), (124_439_808, "124.44 M"), (6_738_415_616, "6.74 B"), (10**12, "1.00 T")],
)
def test_show_count(count: int, shown: str) -> None:
    assert show_count(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 µs"),
        (8.4e-6, "8.4 µs"),
        (9.994e-4, "999 µs"),
        (9.996e-4, "1 ms"),
        (0.0466, "46.6 ms"),
        (0.99951, "1 s"),
        (1.234, "1.23 s"),
        (12345.6, "12346 s"),
    ],
)
def test_show_seconds(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown
