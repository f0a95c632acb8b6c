"""The costs of a change in words: what is computed again, what is sent in addition, and what differs in the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.hardware.cost import step_time
from memcalc.registry import OF_DEEPSPEED, OPTIMIZERS
from memcalc.units import MIB, show_bytes, show_flops, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

_NOTICED: Final = 0.02
"""The share of the communication's time from which more exposed communication is worth a line."""


def costs(before: Report, after: Report) -> str:
    """Return the costs per step and GPU in one line, the most important first."""
    changes = before.setup, after.setup
    work = [] if before.states_only else _work(before, after) or ["nothing more to compute or to send"]
    return " · ".join([*_training(*changes), *_machines(*changes), *work, *_packages(*changes)])


def _training(before: Setup, after: Setup) -> list[str]:
    out: list[str] = []
    if after.optimizer != before.optimizer:
        out.append(f"changes the training: {after.optimizer} instead of {before.optimizer}")
    if after.quantize != before.quantize:
        out.append(f"changes the training: the base is in {after.quantize}")
    if after.precision != before.precision:
        out.append(f"changes the training: {after.precision} instead of {before.precision}")
    if after.precision == before.precision and after.engine == before.engine and after.grad_dtype != before.grad_dtype:
        out.append(f"changes the training: gradients in {after.grad_dtype} instead of {before.grad_dtype}")
    if after.global_batch_size != before.global_batch_size:
        out.append(f"{after.global_batch_size} sequences a step instead of {before.global_batch_size}")
    return out


_PACKAGES: Final = {
    "kernels": {"fused": "Liger-Kernel"},
    "quantize": dict.fromkeys(("nf4", "fp4", "int8"), "bitsandbytes"),
    "cross_entropy": {
        "fused": "Liger-Kernel",
        "chunked": "torch's linear_cross_entropy",
        "flash": "flash-attn",
        "liger": "Liger-Kernel",
    },
    "optimizer": {"lion": "lion-pytorch", "apollo-adamw": "apollo-torch", "galore-adamw": "galore-torch"}
    | {name: "bitsandbytes" for name in OPTIMIZERS if name.endswith("-8bit") or name.startswith("paged-")}
    | {name: "deepspeed" if name == "lamb" else "deepspeed<=0.19.6" for name in OF_DEEPSPEED.known},
}
"""The package that an option's value needs besides torch and transformers. Megatron's kernels need none of these."""


def _packages(before: Setup, after: Setup) -> list[str]:
    if after.kernels == "megatron":
        return []
    values = [(names, getattr(before, option), getattr(after, option)) for option, names in _PACKAGES.items()]
    needed = [names[now] for names, then, now in values if now != then and now in names]
    return [f"needs {name}" for name in dict.fromkeys(needed)]


def _machines(before: Setup, after: Setup) -> list[str]:
    out = [f"{after.gpus} GPUs instead of {before.gpus}"] if after.gpus != before.gpus else []
    if after.engine != before.engine:
        out.append(f"engine {after.engine} instead of {before.engine}")
    if after.micro_batches > before.micro_batches:
        out.append(f"{after.micro_batches} micro-batches instead of {before.micro_batches}")
    return out


def _work(before: Report, after: Report) -> list[str]:
    out: list[str] = []
    if after.setup.quantize != before.setup.quantize:
        out.append("dequantises each weight when it is used")
    again = after.flops["recomputation"] - before.flops["recomputation"]
    if again > 0:
        out.append(f"recomputes {show_flops(again)} (+{again / before.flops['total']:.0%})")
    from memcalc.pipelining.idle import idle_share

    idle, waits = idle_share(before.setup), idle_share(after.setup)
    if waits > idle:
        out.append(f"a pipeline bubble of {waits:.0%} of the ideal time{f' instead of {idle:.0%}' if idle else ''}")
    sent, more = (sum(collective.wire for collective in report.collectives) for report in (before, after))
    if more >= sent + MIB:
        out.append(f"sends {show_bytes(more)}" + (f" instead of {show_bytes(sent)}" if sent else ""))
    then, now = (step_time(report.collectives, report.costs) for report in (before, after))
    if then is not None and now is not None and now.exposed - then.exposed > _NOTICED * then.total:
        before_it = f" instead of {show_seconds(then.exposed)}" if then.exposed else ""
        out.append(f"waits {show_seconds(now.exposed)} for communication{before_it}")
    return out
