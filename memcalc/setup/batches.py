"""The sizes of a step: the tokens of a sequence, and the sequences of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options


def seq_len_of(options: Options, model: Model) -> int:
    """Return the tokens of a sequence; raise InputError if the model cannot take so many."""
    program = model.program
    if options.seq_len is not None and not program.has_sequence:
        why = (
            "the input of --layers has no `seq`"
            if model.model_type == "layers"
            else f"a {model.model_type} is trained on images"
        )
        refuse("seq_len", options.seq_len, f"{why}; allowed: leave it out")
    if options.seq_len is None:
        return min(2048, program.max_seq_len or 2048)
    if program.positions_limit is not None and options.seq_len > program.positions_limit:
        refuse(
            "seq_len",
            options.seq_len,
            f"{model.name} has {program.positions_limit} positions; allowed: 1 to {program.positions_limit}",
        )
    return options.seq_len


def global_batch_size_of(options: Options, dp: int) -> int:
    """Return the sequences of a step; raise InputError if the ranks cannot share them equally."""
    unit = dp * options.micro_batch_size
    if options.global_batch_size is None:
        return unit
    if options.global_batch_size % unit:
        refuse(
            "global_batch_size",
            options.global_batch_size,
            f"is not divisible by dp {dp} · micro-batch {options.micro_batch_size} = {unit}; allowed: a multiple of {unit}",
        )
    return options.global_batch_size


def expert_imbalance_of(options: Options, model: Model | None) -> float:
    """Return the imbalance. At most all tokens of a batch choose the same expert: experts / experts per token times the
    average."""
    imbalance = options.expert_imbalance
    if model is None:
        return imbalance
    per_token, experts = model.program.routed
    if imbalance > 1 and experts == 1:
        refuse("expert_imbalance", imbalance, f"{model.name or model.model_type} has no routed experts; allowed: 1.0")
    if imbalance > 1 and imbalance * per_token > experts:
        routing = f"{per_token} of {experts} experts per token"
        refuse("expert_imbalance", imbalance, f"{routing} cannot be that uneven; allowed: 1 to {experts / per_token:g}")
    return imbalance
