"""Why one plan is better than the next, in one sentence of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.planning.result import Plan
    from memcalc.planning.target import Target

_PARTS: Final = {
    "compute": "compute",
    "recompute": "recomputation",
    "exposed_communication": "waiting for communication",
    "bubble": "waiting for other stages",
    "optimizer": "optimizer time",
}


_EQUAL: Final = 5e-4
"""The share of a step below which two times are told as equal: it would be printed as 0.0%."""


def name_of(plan: Plan) -> str:
    """Return a layout in a few words: "megatron, tp 8, pp 4, dp 2, ZeRO 1"."""
    one = plan.layout
    degrees = [f"{axis} {getattr(one, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(one, axis) > 1]
    parts = [one.engine, *([f"ZeRO {one.zero}"] if one.zero else []), *degrees, f"dp {one.dp}"]
    if one.virtual_stages > 1:
        parts.append(f"{one.virtual_stages} chunks")
    if one.shard_group is not None:
        parts.append(f"shards of {one.shard_group}")
    if one.tp > 1 and one.sequence_parallel:
        parts.append("sequence-parallel")
    parts.append(f"micro-batch {one.micro_batch_size}")
    if one.recompute != "none":
        parts.append(f"recompute {one.recompute}")
    return ", ".join(parts)


def why_better(plan: Plan, other: Plan | None, target: Target) -> str:
    """Return why a plan stands before the next one; why it stands there at all if there is no next."""
    own = plan.document["time"]
    if other is None:
        return f"a step takes {show_seconds(plan.seconds)}, {_largest(plan)}"
    theirs = other.document["time"]
    words: list[str] = []
    if target.objective == "cost" and plan.cost is not None and other.cost is not None and plan.cost != other.cost:
        words.append(f"it costs {plan.cost:,.2f}, number {other.rank} {other.cost:,.2f}")
    elif target.objective == "gpus" and plan.layout.gpus != other.layout.gpus:
        words.append(f"it takes {plan.layout.gpus} GPUs, number {other.rank} {other.layout.gpus}")
    less = other.seconds - plan.seconds
    words.append(f"a step takes {show_seconds(plan.seconds)}, {_beside(less, other)}")
    gains = {part: theirs["breakdown"][part] - own["breakdown"][part] for part in _PARTS}
    part = max(gains, key=lambda name: gains[name] * (1 if less >= 0 else -1))
    gain = gains[part]
    if gain and abs(less) >= _EQUAL * other.seconds:
        words.append(f"with {show_seconds(abs(gain))} {'less' if gain > 0 else 'more'} {_PARTS[part]}")
    room = other.device - plan.device
    words.append(
        f"{'and' if room >= 0 else 'but'} needs {show_bytes(abs(room))} {'less' if room >= 0 else 'more'} memory"
    )
    return ", ".join(words)


def _beside(less: float, other: Plan) -> str:
    """Return by how much a step is shorter than another plan's."""
    if abs(less) < _EQUAL * other.seconds:
        return f"as long as number {other.rank}'s"
    share = f"{abs(less) / other.seconds:.1%}"
    return f"{show_seconds(abs(less))} {'less' if less >= 0 else 'more'} than number {other.rank}'s ({share})"


def _largest(plan: Plan) -> str:
    breakdown = plan.document["time"]["breakdown"]
    part = max(_PARTS, key=lambda name: breakdown[name])
    return f"{show_seconds(breakdown[part])} of it {_PARTS[part]}"
