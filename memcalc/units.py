"""Conversion of bytes to GiB or GB, and of counts to words. No other module converts them.

1 GiB is 2**30 bytes, 1 GB is 10**9 bytes. Everything inside memcalc is an integer number of bytes.
"""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
MICRO: Final = 1e-6
"""The seconds of a microsecond."""

_BYTES: Final = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 2**40,
}  # fmt: skip
_COUNTS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def to_bytes(value: float, unit: str) -> int:
    """Return `value` of `unit` ("GB", "MiB", ...) in bytes. A trailing "/s" is allowed. Raises KeyError for an unknown
    unit."""
    return round(value * _BYTES[unit.removesuffix("/s")])


def parse_count(text: str) -> int | None:
    """Return "7.5B", "350M", "7_500_000_000" or "7500000000" as an integer; None for anything else."""
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        return None
    from decimal import Decimal

    number = Decimal(match[1].replace("_", "").replace(",", "")) * _COUNTS[match[2].upper()]
    return int(number) if number == int(number) else None


def show_bytes(nbytes: int) -> str:
    """Return a size for people, in binary units: "13.48 GiB", "512 B"."""
    sign, size = ("-" if nbytes < 0 else ""), abs(nbytes)
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size} B"


def in_gib(nbytes: int) -> float:
    """Return a size in GiB."""
    return nbytes / GIB


def show_gb(nbytes: int | float) -> str:
    """A size in decimal units, three digits of it: "112 GB", "1.88 GB"."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(nbytes) >= 0.9995 * factor:
            value = nbytes / factor
            return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"
    return f"{round(nbytes)} B"


def show_seconds(seconds: float) -> str:
    """Return a time for people with three digits: "1.23 s", "24.4 ms", "8.4 µs"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * factor:  # rounding reaches this unit
            value = seconds / factor
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def show_flops(flops: int) -> str:
    """Return a number of floating-point operations for people with three digits: "29.3 TFLOP"."""
    for unit, factor in (("EFLOP", 10**18), ("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if flops >= 0.9995 * factor:
            value = flops / factor
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{flops} FLOP"


def show_count(number: int) -> str:
    """Return a parameter count for people: "6.74 B", "124.4 M"."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return str(number)
