"""Checks of a setup with torch's context parallelism: the demands of torch, accelerate and transformers' Trainer, and
the limits of what is modelled. Each refusal is an InputError of one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.attention import ALIGNED_QUERIES
from memcalc.core.tensor import Memory
from memcalc.families.base.module import Run
from memcalc.inputs.options import NOT_YET, refuse

if TYPE_CHECKING:
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options

_WITH: Final = "with engine fsdp2 and cp above 1 "
_DROPOUTS: Final = ("attention_dropout", "attn_pdrop")
_WINDOWED: Final = 1 << 30
"""A number of tokens that exceeds any window."""


def check_shared_sequences(options: Options, precision: str, seq_len: int, attention: str, model: Model) -> None:
    """Raise InputError for a setup that cannot share its sequences. Options are checked first, then the model, then
    divisibility."""
    if options.padded:
        why = "torch's context parallelism has no masks, and accelerate removes the padding mask"
        refuse("padded", "on", f"{_WITH}{why}; allowed: off")
    if options.attention == "eager":
        why = "torch's context_parallel needs scaled_dot_product_attention"
        refuse("attention", options.attention, f"{_WITH}{why}; allowed: sdpa")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"{_WITH}{NOT_YET}hf")
    if options.cross_entropy not in (None, "eager"):
        refuse("cross_entropy", options.cross_entropy, f"{_WITH}{NOT_YET}eager")
    if precision.endswith("-autocast"):
        refuse("precision", precision, f"{_WITH}{NOT_YET}fp32, bf16, fp16, bf16-mixed, fp16-mixed")
    _check_model(options, attention, model)
    _check_division(options, precision, seq_len, model)


def _check_model(options: Options, attention: str, model: Model) -> None:
    name, program = model.name or f"this {model.model_type}", model.program
    if attention != "sdpa" or not model.support.context_parallel:
        refuse("cp", options.cp, f"with engine fsdp2 for a {model.model_type} {NOT_YET}1")
    if has_windows(program):
        why = f"{name} has layers with a sliding window, which accelerate refuses: they would attend to all tokens"
        refuse("cp", options.cp, f"with engine fsdp2: {why}; allowed: 1")
    for field in _DROPOUTS:
        p = getattr(program.config, field, 0.0)
        if p:
            why = f"{name} has {field} {p}, and torch's ring keeps the random state of its last part only"
            refuse("cp", options.cp, f"with engine fsdp2: {why}; allowed: 1, or a config with {field} 0")


def has_windows(program: Program) -> bool:
    """Tell whether some layer does not attend to all earlier tokens."""
    own: Any = program
    kinds = {own.layer_kind(i) for i in range(own.layers)}
    if kinds != {"full_attention"}:
        return True
    run = Run(Memory(), fp32, "sdpa", False, Dim("batch", 1), Dim("seq", _WINDOWED))
    return own.masks(run)["full_attention"] is not None


def _check_division(options: Options, precision: str, seq_len: int, model: Model) -> None:
    program: Any = model.program
    chunks, parts = 2 * options.cp, options.tp if options.sequence_parallel else 1
    if seq_len % (chunks * parts):
        each = f"2·cp = {chunks} chunks" if parts == 1 else f"2·cp·tp = {chunks * parts} parts"
        why = f"does not divide into {each}, two for each rank"
        refuse("seq_len", seq_len, f"{why}; allowed: a multiple of {chunks * parts}")
    latent = "v_dim" in vars(program) and program.v_dim.size != program.qk_dim.size
    if precision != "fp32" and not latent:
        return
    if not latent and program.heads.size != program.kv_heads.size:
        why = (
            f"{model.name or model.model_type} has grouped key/value heads, for which CUDA has no fused kernel in fp32"
        )
        refuse("precision", precision, f"{_WITH}{why}; allowed: bf16, fp16, bf16-mixed, fp16-mixed")
    if seq_len // chunks % ALIGNED_QUERIES:
        kernel = "fp32's" if precision == "fp32" else "latent attention's"
        why = (
            f"leaves chunks of {seq_len // chunks} tokens; {kernel} kernel pads them to a multiple of {ALIGNED_QUERIES}"
        )
        refuse(
            "seq_len",
            seq_len,
            f"{why}, which torch's ring cannot merge; allowed: a multiple of {ALIGNED_QUERIES * chunks}",
        )
