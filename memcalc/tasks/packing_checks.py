"""Refusals of packed rows: what no trainer does with them, or what is not modelled, each by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_ENGINES: Final = ("none", "ddp", "deepspeed", "fsdp2")
_AXES: Final = ("tp", "pp", "cp", "ep")
_TASKS: Final = ("pretrain", "sft")
CHECKED: Final = (
    "arcee", "cohere", "ernie4_5", "gemma", "glm", "granite", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral",
    "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
"""The types whose step over packed rows is compared with transformers' own."""
_KERNELS: Final = ("hf", "fused")


def check_packing(options: Options, engine: str, precision: str, model: Model | None) -> None:
    """Raise InputError for packed rows with an engine, a task or a model that they are not modelled with."""
    if model is None:
        refuse("packing", True, "a number of parameters has no sequences; allowed: with --model")
    if model.model_type not in CHECKED:
        refuse("packing", True, f"for a {model.model_type} {NOT_YET}off, or one of {', '.join(CHECKED)}")
    if engine not in _ENGINES:
        refuse("packing", True, f"with engine {engine} {NOT_YET}with --engine {', '.join(_ENGINES)}")
    if options.task not in _TASKS:
        refuse(
            "packing", True, f"TRL's trainer of {options.task} packs nothing; allowed: with --task {', '.join(_TASKS)}"
        )
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse("packing", True, f"with --{axis} {getattr(options, axis)} {NOT_YET}with --{axis} 1")
    if options.padded:
        refuse("padded", True, "packed rows have no padding, and TRL's collator gives no mask with them; allowed: off")
    if options.kernels not in (None, *_KERNELS):
        refuse("kernels", options.kernels, f"with --packing {NOT_YET}{', '.join(_KERNELS)}")
    if options.attention not in (None, "flash", "sdpa"):
        refuse("attention", options.attention, f"with --packing {NOT_YET}flash, sdpa")
    if options.attention != "sdpa":
        from memcalc.kernels.gpus_of_flash import check_gpu

        _check_flash(precision, model)
        check_gpu(options)


def _check_flash(precision: str, model: Model) -> None:
    """Raise InputError for operands that flash-attn does not take."""
    from memcalc.kernels.flash_operands import WIDEST

    if precision == "fp32":
        why = "flash-attn takes 16 bits, and precision is fp32"
        refuse("packing", True, f"{why}; allowed: with --attention sdpa, or --precision bf16-mixed, bf16-autocast, …")
    program = model.program
    width = program.head_dim.size  # type: ignore[attr-defined]
    if width > WIDEST:
        refuse(
            "packing", True, f"flash-attn takes heads of up to {WIDEST}, not {width}; allowed: with --attention sdpa"
        )


def check_lengths(options: Options, seq_len: int | None) -> None:
    """Raise InputError for lengths that are none, that no row has room for, or that do not matter."""
    from memcalc.inputs.lengths import lengths_of

    given = lengths_of(options.lengths or "")
    if not options.packing:
        why = "without --packing rows are padded, and counted as long as --seq-len, the longest"
        refuse("lengths", options.lengths, f"{why}; allowed: with --packing")
    if options.attention == "sdpa":
        refuse(
            "lengths",
            options.lengths,
            "with sdpa each token is multiplied with all of its row; allowed: --attention flash",
        )
    if given.longest > (seq_len or 0):
        why = f"a sequence of {given.longest} tokens is longer than a row of --seq-len {seq_len}"
        refuse("lengths", options.lengths, f"{why}; allowed: up to {seq_len}")
