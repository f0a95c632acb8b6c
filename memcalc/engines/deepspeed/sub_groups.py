"""Sub-groups: the parameters that stage 3 of ZeRO takes at a time in its step, and those that it keeps whole."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from memcalc.engines.deepspeed.zero_layout import frozen, groups_of, sizes_of, thresholds_of

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


class SubGroup(NamedTuple):
    """Parameters that stage 3's step takes at a time."""

    ranks: int
    parts: list[int]
    """The elements of a rank's part of each parameter."""


def sub_groups_of(model: Model, setup: Setup) -> list[SubGroup]:
    """Return the sub-groups of each of the optimizer's groups (stage3.py, _create_fp16_sub_groups)."""
    assert setup.sub_group_size is not None
    return [
        SubGroup(group.ranks, parts)
        for group in groups_of(model, setup.shards)
        for parts in sub_groups(
            [-(-(end - start) // group.ranks) for start, end in pairwise(group.starts)], setup.sub_group_size
        )
    ]


def persistent(model: Model, setup: Setup) -> dict[int, list[int]]:
    """Return the padded elements of the parameters that stage 3 keeps whole, by the number of ranks that they are
    sharded over."""
    most = thresholds_of(setup).persistence
    out: dict[int, list[int]] = {}
    if idle := frozen(model):
        sizes, ranks = sizes_of(model), setup.shards
        out[ranks] = [-(-sizes[i] // ranks) * ranks for i in sorted(idle) if sizes[i] <= most]
    for group in groups_of(model, setup.shards):
        sizes = [end - start for start, end in pairwise(group.starts)]
        out.setdefault(group.ranks, []).extend(-(-n // group.ranks) * group.ranks for n in sizes if n <= most)
    return {ranks: sizes for ranks, sizes in out.items() if sizes}


def sub_groups(partitions: list[int], size: int) -> list[list[int]]:
    """Return the partitions that the step takes at a time. A sub-group closes when it has `size` elements."""
    out: list[list[int]] = [[]]
    current = 0
    for n in partitions:
        if current >= size:
            out.append([])
            current = 0
        out[-1].append(n)
        current += n
    return out
