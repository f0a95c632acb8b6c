"""The plans as text, for people."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Final

from memcalc.inputs.gpu import load_gpu
from memcalc.planning.picture import picture
from memcalc.planning.why import name_of
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.planning.result import NoFit, Plan, Plans

_BAR: Final = 24
_LETTERS: Final = {
    "compute": "█", "recompute": "▓", "exposed_communication": "▒", "bubble": "░", "optimizer": "■",
}  # fmt: skip
_WORDS: Final = {
    "compute": "compute", "recompute": "recomputation", "exposed_communication": "communication",
    "bubble": "waiting for other stages", "optimizer": "optimizer",
}  # fmt: skip


def lines_of(plans: Plans, width: int) -> list[str]:
    """Return the lines of the answer, for a terminal of a width."""
    out = _heading(plans, width)
    if plans.plans:
        out += ["", *_table(plans, width), ""]
        out += _wrapped(f"1 is best: {plans.plans[0].why}", width)
        drawn = picture(plans, width)
        out += ["", *drawn[:-2], *(line for words in drawn[-2:] for line in _wrapped(words, width))] if drawn else []
        out += ["", *_wrapped(f"number 1: {command_of(plans.plans[0], plans.model)}", width)]
    return [*out, "", *_counts(plans, width)]


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, max(40, min(width, 100)), subsequent_indent="  ", break_on_hyphens=False)


def _heading(plans: Plans, width: int) -> list[str]:
    counts = sorted({gpus for _, gpus in plans.clusters})
    on = " or ".join(dict.fromkeys(load_gpu(gpu).full_name for gpu, _ in plans.clusters))
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]} ({len(counts)} numbers)"
    out = _wrapped(f"{many} × {on}, by {plans.target.objective}", width)
    if not plans.complete:
        out += _wrapped("stopped: the best so far; what was not looked at may be better", width)
    if not plans.plans and plans.no_fit is not None:
        out += _wrapped(_nothing_fits(plans.no_fit), width)
    elif not plans.plans and plans.best_missing is not None:
        out += _wrapped(_misses(plans, plans.best_missing), width)
    elif not plans.plans and plans.counts.unknown:
        ((why, count),) = plans.counts.unknown.most_common(1)
        out += _wrapped(f"no layout has a time that is known; {count:,} of them: {why}", width)
    elif not plans.plans:
        out += _wrapped("no layout was found to fit", width)
    return out


def _nothing_fits(near: NoFit) -> str:
    capacity = load_gpu(near.layout.gpu).capacity
    over = show_bytes(near.needs - capacity)
    others = (
        f"; GPUs that have so much: {', '.join(near.gpus_that_do)}"
        if near.gpus_that_do
        else "; no known GPU has so much"
    )
    more = f"; or {_more_gpus(near.layout.gpus)}, fewer tokens (--seq-len), another --optimizer or --lora-rank"
    return (
        f"does not fit: the nearest layout needs {show_bytes(near.needs)} of {show_bytes(capacity)}, {over} too much, most of "
        f"it {near.row} ({_degrees(near)}){others}{more}"
    )


def _more_gpus(gpus: int) -> str:
    return f"more than {gpus} GPUs" if gpus > 1 else "several GPUs"


def _degrees(near: NoFit) -> str:
    one = near.layout
    degrees = [f"{axis} {getattr(one, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(one, axis) > 1]
    return ", ".join([one.engine, f"ZeRO {one.zero}", *degrees, f"recompute {one.recompute}"])


def _misses(plans: Plans, best: Plan) -> str:
    target = plans.target
    words: list[str] = []
    if target.days is not None and best.days is not None:
        words.append(f"{show_days(best.days)}, the target is {_some(target.days, 'day')}")
    if target.budget is not None and best.cost is not None:
        words.append(f"{best.cost:,.0f} of the budget of {target.budget:,.0f}")
    where = f"{_some(best.layout.gpus, 'GPU')}, {name_of(best)}"
    return f"it fits, but misses the target: the best layout takes {' and '.join(words)} ({where})"


def _table(plans: Plans, width: int) -> list[str]:
    single = len(plans.clusters) == 1
    out: list[str] = []
    for one in plans.plans:
        time, memory = one.document["time"], one.document["memory"]
        where = "" if single else f"{one.layout.gpus} × {one.layout.gpu}: "
        out += _wrapped(f"{one.rank}. {where}{name_of(one)}", width)
        mfu = "" if time["mfu"] is None else f", MFU {time['mfu']:.0%}"
        goal = "" if one.days is None else f" · {show_days(one.days)}, {one.gpu_hours:,.0f} GPU hours"
        cost = (
            ""
            if one.cost is None
            else f" · costs {one.cost:,.2f}"
            if one.days is not None
            else f" · {one.cost:,.4g} a step"
        )
        span = f"{show_seconds(one.seconds)} ({show_seconds(time['low'])} to {show_seconds(time['high'])})"
        first, more = f"{span}{mfu} · {show_bytes(memory['device'])}", (goal + cost).removeprefix(" · ")
        out += _beside_a_bar(_bar(one), [first, more] if more else [first], width)
    used = {part for one in plans.plans for part in _LETTERS if _share(one, part) * _BAR >= 0.5}
    legend = " · ".join(f"{_LETTERS[part]} {_WORDS[part]}" for part in _LETTERS if part in used)
    return [*out, f"   {legend}"]


def _beside_a_bar(bar: str, parts: list[str], width: int) -> list[str]:
    """Return a plan's numbers in as few lines as the width has room for: beside its bar, or below it."""
    whole, first = f"   {bar}  {' · '.join(parts)}", f"   {bar}  {parts[0]}"
    if len(whole) <= width:
        return [whole]
    beside = len(first) <= width
    below = parts[1:] if beside else parts
    return [first if beside else f"   {bar}", *(line for part in below for line in _wrapped(f"   {part}", width))]


def _some(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def show_days(days: float) -> str:
    """Return a time in days, below two in hours: three digits."""
    return f"{days:,.3g} days" if days >= 2 else f"{24 * days:,.3g} hours"


def _share(one: Plan, part: str) -> float:
    return one.document["time"]["breakdown"][part] / one.seconds


def _bar(one: Plan) -> str:
    """Return a bar of where the time of a step goes."""
    drawn, total = "", 0.0
    for part, letter in _LETTERS.items():
        total += _share(one, part)
        drawn += letter * (round(total * _BAR) - len(drawn))
    return drawn


def command_of(plan: Plan, model: str) -> str:
    """Return the command that estimates a plan."""
    words: list[str] = []
    for name, value in plan.options.items():
        default = {
            "ep": 1,
            "cp": 1,
            "pp": 1,
            "tp": 1,
            "virtual_stages": 1,
            "schedule": "1f1b",
            "recompute": "none",
            "zero": 0,
        }
        if value is None or default.get(name) == value or (name == "sequence_parallel" and plan.layout.tp == 1):
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words.append(f"{flag} {value}")
    return f"memcalc estimate {model or 'MODEL'} " + " ".join(words)


def _counts(plans: Plans, width: int) -> list[str]:
    counts = plans.counts
    parts = [
        f"{counts.enumerated:,} layouts in {show_seconds(plans.elapsed_seconds)}: {counts.invalid.total():,} invalid"
    ]
    parts.append(f"{counts.too_large.total():,} too large")
    if counts.misses:
        parts.append(f"{counts.misses:,} miss the target")
    if counts.unknown:
        parts.append(f"{counts.unknown.total():,} without a known time")
    last = f" than number {len(plans.plans)}" if plans.plans else ""
    parts.append(
        f"{plans.slower:,} slower{last} by a lower bound of their time" if plans.complete else f"{plans.slower:,} left"
    )
    out = _wrapped(f"{', '.join(parts)}; {counts.evaluated:,} were estimated", width)
    document = plans.to_dict()["layouts"]
    for title, of in (("invalid", document["invalid_by_option"]), ("too large", document["too_large_by_row"])):
        if of:
            shown = ", ".join(f"{name} {times:,}" for name, times in [*of.items()][:6])
            out += _wrapped(
                f"{title}, by {'option' if title == 'invalid' else 'what most of the memory is'}: {shown}", width
            )
    return out
