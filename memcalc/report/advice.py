"""Which changes would lower the peak most: each is the same estimate with one option changed, computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.errors import InputError
from memcalc.inputs.options import check_options
from memcalc.setup import ZERO_SIZES, Setup, resolve

if TYPE_CHECKING:
    from memcalc.estimation import Report

_MOST = 3
_WORTH = 50  # a change that saves less than a fiftieth of the peak is not worth a line


class Change(NamedTuple):
    """One change on the command line, what it saves and the peak that it leaves."""

    flags: str
    saves: int
    peak: int


def advice(report: Report) -> list[Change]:
    """The changes that save most, best first."""
    changes: list[Change] = []
    for options in _candidates(report.setup, report.peak_phase):
        peak = _peak_with(report, options)
        if peak is not None and (report.peak - peak) * _WORTH > report.peak:
            flags = " ".join(_flag(name, value) for name, value in options.items())
            changes.append(Change(flags, report.peak - peak, peak))
    changes.sort(key=lambda change: -change.saves)
    return _one_of_a_kind(changes)[:_MOST]


def _flag(name: str, value: Any) -> str:
    dashed = name.replace("_", "-")
    return f"--no-{dashed}" if value is False else f"--{dashed} {value}"


def _candidates(s: Setup, peak_phase: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if s.seq_len is not None:
        if peak_phase != "step":  # the step has no activations to save
            out.append({"recompute": "full"})
        out.append({"attention": "sdpa"})
        if s.micro_batch_size > 1:
            out.append({"micro_batch_size": s.micro_batch_size // 2, "global_batch_size": s.global_batch_size})
    if s.engine == "megatron":
        out += [{"zero": 1}] if s.zero == 0 and s.dp > 1 else []
        out += [{"recompute": "selective"}] if s.recompute == "none" else []
        out += [{"attention_mask_in_dataloader": False}]
    elif s.engine == "fsdp2":
        out.append({"zero": 3})
        out += [{"ep": 2 * s.ep}] if s.ep > 1 else []  # fewer copies of the experts, and less padding of them
    else:
        out += [{"zero": stage, "engine": "deepspeed"} for stage in range(s.zero + 1, 4) if s.gpus > 1]
        out += [
            {"zero": stage} for stage in range(1, s.zero)
        ]  # of a small model the buffers of a stage outweigh its shards
    if s.gpus == 1:
        out.append({"gpus": 8, "zero": 3})
    out += [{"optimizer_implementation": "fused"}, {"optimizer": "adamw-8bit"}]
    return out


def _one_of_a_kind(changes: list[Change]) -> list[Change]:
    """Of several ZeRO stages the best one."""
    out: list[Change] = []
    for change in changes:
        kind = change.flags.split()[0]
        if all(other.flags.split()[0] != kind for other in out):
            out.append(change)
    return out


def _peak_with(report: Report, changed: dict[str, Any]) -> int | None:
    from memcalc.estimation import Report as Estimated

    s = report.setup
    if all(getattr(s, name) == value for name, value in changed.items()):
        return None
    keep: dict[str, Any] = {name: value for name, value in s._asdict().items() if name != "dp"}
    if "engine" in changed or "gpus" in changed:
        keep["shard_group"] = keep["grad_dtype"] = keep["etp"] = None
    if changed.get("zero", s.zero) < s.zero:
        keep |= {name: None for name, (stage, _) in ZERO_SIZES.items() if stage > changed["zero"]}
    if "gpus" in changed:
        keep["engine"] = None
        keep["optimizer_implementation"] = None
        keep["global_batch_size"] = None
    if "optimizer" in changed:
        keep["optimizer_implementation"] = None
    if "micro_batch_size" in changed and s.global_batch_size % (s.dp * changed["micro_batch_size"]):
        return None
    try:
        options = check_options({name: value for name, value in {**keep, **changed}.items() if value is not None})
        from memcalc.inputs.model import Model

        return Estimated(report.model, resolve(options, report.model if isinstance(report.model, Model) else None)).peak
    except InputError:
        return None
