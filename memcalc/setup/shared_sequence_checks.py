"""Refusals of setups whose ranks share sequences: torch's sequence parallelism, and DeepSpeed's Ulysses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_MASK_OF_SHARD: Final = "transformers makes a mask only as long as a shard"


def check_sequence_parallel(options: Options, seq_len: int, attention: str, model: Model) -> None:
    """Raise InputError for what torch's plan cannot run over shards of a sequence, and for dims that do not divide."""
    if not model.support.sequence_parallel:
        refuse("sequence_parallel", "on", f"with engine fsdp2 for a {model.model_type} {NOT_YET}off")
    program: Any = model.program
    if program.ffn.size % options.tp:
        why = f"{model.name} has a feed-forward width of {program.ffn.size}, which is not divisible by tp {options.tp}"
        refuse("sequence_parallel", "on", f"{why}, as torch's plan needs; allowed: off, or another --tp")
    if seq_len % options.tp:
        why = f"is not divisible by tp {options.tp}, and torch's SequenceParallel needs equal parts"
        refuse("seq_len", seq_len, f"{why}; allowed: a multiple of {options.tp}")
    if options.padded:
        refuse("padded", "on", f"with sequence parallelism {_MASK_OF_SHARD}; allowed: off")
    if attention == "eager":
        refuse("attention", attention, f"with sequence parallelism {_MASK_OF_SHARD}; allowed: sdpa")
    from memcalc.layout.sequence_parallel import masks

    if masks(program, attention, seq_len):
        why = f"with sequence parallelism and the sliding window of {model.name}, {_MASK_OF_SHARD}"
        refuse("seq_len", seq_len, f"{why}; allowed: less than the window, or --no-sequence-parallel")


def check_context_parallel(options: Options, seq_len: int, attention: str, model: Model) -> None:
    """Raise InputError for what DeepSpeed's UlyssesSPAttentionHF refuses, and for dims that do not divide."""
    ranks, program = options.cp, cast(Any, model.program)
    if attention == "eager":
        why = f"has a mask of seq² entries, with which DeepSpeed shares no sequence (cp {ranks})"
        refuse("attention", attention, f"{why}; allowed: {'sdpa' if 'sdpa' in program.attention_kinds else '--cp 1'}")
    if not model.support.ulysses:
        refuse("cp", ranks, f"with engine deepspeed for a {model.model_type} {NOT_YET}1")
    if model.support.ulysses_wants_head_dim and program.config.head_dim is None:
        why = f"DeepSpeed reads head_dim, which the configuration of {model.name or model.model_type} leaves out"
        refuse("cp", ranks, f"{why}; allowed: 1, or a config.json with it")
    heads, kv_heads = program.heads.size, program.kv_heads.size
    if heads % ranks:
        why = f"does not divide the {heads} attention heads of {model.name or model.model_type}"
        refuse("cp", ranks, f"{why}; allowed: a divisor of {heads}")
    if kv_heads % ranks and ranks % kv_heads:
        why = f"neither divides the {kv_heads} key/value heads of {model.name or model.model_type} nor is a multiple of them"
        fit = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        refuse("cp", ranks, f"{why}; allowed: {', '.join(map(str, fit))}")
    if seq_len % ranks:
        why = f"is not divisible by cp {ranks}, and each rank needs an equal part"
        refuse("seq_len", seq_len, f"{why}; allowed: a multiple of {ranks}")
    if options.padded:
        refuse(
            "padded", "on", "DeepSpeed drops the padding mask of a sequence that ranks share; allowed: off, or --cp 1"
        )
    from memcalc.layout.sequence_parallel import layers_mask

    if layers_mask(program, attention, seq_len):
        why = f"DeepSpeed drops the mask of a shared sequence, and {model.name or model.model_type} needs it for its window"
        refuse("seq_len", seq_len, f"{why}; allowed: less than the window, or --cp 1")
    if options.cross_entropy not in (None, "eager"):
        refuse("cross_entropy", options.cross_entropy, f"with engine deepspeed and cp {ranks} {NOT_YET}eager")
