"""The buckets of relative positions that T5 adds to its scores (models/t5/modeling_t5.py)."""

from __future__ import annotations

from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.elementwise import add_, cast, like, of_two
from memcalc.core.tensor import Tensor


def relative_position_buckets(relative_position: Tensor, *, bidirectional: bool) -> Tensor:
    """Return T5Attention._relative_position_bucket."""

    def positions(name: str) -> Tensor:
        return like(relative_position, name)

    relative_buckets = None
    if bidirectional:
        relative_buckets = like(cast(like(relative_position, "above", boolean), int64), "buckets")
        relative_buckets = like(relative_buckets, "buckets")
        relative_position = positions("distances")
    else:
        relative_position = like(of_two(relative_position, positions("zeros"), "distances"), "distances")
    is_small = like(relative_position, "small", boolean)
    relative = like(like(cast(relative_position, fp32), "div"), "log")
    relative = like(relative, "div")
    relative = like(relative, "mul")
    relative = cast(relative, int64)
    relative_position_if_large = like(relative, "large distances")
    del relative
    relative_position_if_large = of_two(relative_position_if_large, positions("last bucket"), "large distances")
    chosen = of_two(relative_position, relative_position_if_large, "buckets")
    if relative_buckets is None:
        relative_buckets = like(chosen, "buckets")
    else:
        relative_buckets = add_(relative_buckets, chosen)
    del is_small
    return relative_buckets
