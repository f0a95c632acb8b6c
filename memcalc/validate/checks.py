"""Checks of setups that a backend cannot run, each by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.engines.deepspeed.zero_optimizer import has_fused_adam
from memcalc.errors import InputError
from memcalc.inputs.options import NOT_YET, option_name, refuse

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

BACKENDS: Final = ("fake", "cuda")
_ENGINES: Final = ("none", "ddp", "fsdp2", "deepspeed")
_KERNELS: Final = ("hf", "fused")
INSTALL: Final = "pip install 'memcalc-llm[validate]'"


def check(report: Report, backend: str) -> None:
    """Raise InputError for a setup that is estimated but not run."""
    s = report.setup
    if s.seq_len is None:
        raise InputError("--params: a number of parameters has no code that could be run; allowed: --model")
    if s.engine not in _ENGINES:
        kernels = "Transformer Engine has no kernels for tensors without data; " if backend == "fake" else ""
        refuse("engine", s.engine, f"{kernels}to be run {NOT_YET}{', '.join(_ENGINES)}{_instead(s)}")
    if s.engine == "deepspeed" and max(s.tp, s.pp) > 1:
        axis = next(axis for axis in ("tp", "pp") if getattr(s, axis) > 1)
        refuse(axis, getattr(s, axis), f"with engine deepspeed to be run {NOT_YET}1")
    losses = ("eager", "fused", "chunked", "flash", "liger") if backend == "fake" else ("eager", "fused", "liger")
    if s.kernels not in _KERNELS:
        refuse("kernels", s.kernels, f"to be run {NOT_YET}{', '.join(_KERNELS)}")
    if s.cross_entropy not in losses and not s.sequence_parallel and s.task == "pretrain":
        refuse("cross_entropy", s.cross_entropy, f"to be run {NOT_YET}{', '.join(losses)}")
    if s.recompute not in ("none", "op", "full"):
        refuse("recompute", s.recompute, f"to be run {NOT_YET}none, op, full")
    if s.engine == "deepspeed" and s.zero == 0 and not has_fused_adam(s):
        given = f"{s.optimizer} ({s.optimizer_implementation})"
        own = "adamw, adam (both fused, DeepSpeed's own), or --zero 1, 2, 3"
        refuse("optimizer", given, f"with engine deepspeed and zero 0 to be run {NOT_YET}{own}")
    if s.expert_imbalance != 1:
        refuse("expert_imbalance", s.expert_imbalance, f"to be run {NOT_YET}1.0")
    if s.ep > 1 and s.engine == "fsdp2":
        per_token, experts = report.model.program.routed
        copies = (
            s.micro_batch_size * s.seq_len // s.tp * per_token
        )  # each rank of a tensor-parallel group sends its slice
        if copies % experts:
            slices = "of a micro-batch's tokens" if s.tp == 1 else f"of a slice (1/{s.tp}) of a micro-batch's tokens"
            why = f"{copies} copies {slices} do not spread evenly over {experts} experts"
            refuse("seq_len", s.seq_len, f"{why}; allowed: a multiple of {experts * s.tp}")


def _instead(s: Setup) -> str:
    """Return the options that run the setup's parallelism: one of the engines that are run has all of its axes."""
    axes = [f"{option_name(axis)} {getattr(s, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(s, axis) > 1]
    return f"; with {' '.join(axes)}: --engine fsdp2 --zero 3" if axes else ""


def fields_of(model: Model) -> dict[str, object]:
    """Return the config.json that the model was made from."""
    if model.fields is None:
        raise InputError(f"--model {model.name}: was not made of a config.json")
    return dict(model.fields)
