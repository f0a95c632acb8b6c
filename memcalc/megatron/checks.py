"""Checks of a setup with Megatron: its demands (megatron/training/arguments.py,
core/transformer/transformer_config.py), and the limits of what is modelled. Each refusal is an InputError of one line.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final, NoReturn

from memcalc.families import support_of, supporting
from memcalc.families.base.architecture import architecture_of, unfit
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.megatron.schedules import bubble, layers_of_chunks

if TYPE_CHECKING:
    from memcalc.families.base.architecture import Architecture
    from memcalc.inputs.options import Options


_OF_MEGATRON: Final = ("gpipe", "1f1b", "interleaved")


def check_step(options: Options, micro_batches: int) -> None:
    """Raise InputError for an optimizer or schedule that Megatron does not have. No model is needed."""
    if options.zero > 1:
        refuse("zero", options.zero, "Megatron's distributed optimizer is ZeRO-1; allowed: 0, 1")
    if options.optimizer not in ("adamw", "adam", "muon"):
        refuse("optimizer", options.optimizer, f"with engine megatron {NOT_YET}adamw, adam, muon")
    if options.optimizer == "muon" and options.precision != "bf16-mixed":
        refuse("precision", options.precision, f"with engine megatron and optimizer muon {NOT_YET}bf16-mixed")
    if options.optimizer == "muon" and options.zero and options.shard_group is not None:
        refuse("shard_group", options.shard_group, "Megatron's dist_muon has one instance; allowed: leave it out")
    if options.optimizer_implementation not in (None, "fused"):
        refuse("optimizer_implementation", options.optimizer_implementation, "Megatron's Adam is fused; allowed: fused")
    if options.schedule == "zero-bubble":
        _refuse_zero_bubble(options, micro_batches)
    if options.schedule not in _OF_MEGATRON:
        why = "Megatron-Core has no such schedule, so its memory is not known"
        refuse("schedule", options.schedule, f"{why}; allowed: {', '.join(_OF_MEGATRON)}, or --engine fsdp2 --zero 2")
    if (options.schedule == "interleaved") != (options.virtual_stages > 1):
        why = f"does not go with schedule {options.schedule}"
        allowed = "2 or more with schedule interleaved, 1 with the others"
        refuse("virtual_stages", options.virtual_stages, f"{why}; allowed: {allowed}")
    grouped = options.microbatch_group_size not in (None, options.pp)
    if options.schedule == "interleaved" and not grouped and micro_batches % options.pp:
        why = f"interleaved needs a multiple of pp {options.pp} micro-batches per step, not {micro_batches}"
        refuse("schedule", "interleaved", f"{why}; allowed: another --global-batch-size")


def _refuse_zero_bubble(options: Options, micro_batches: int) -> NoReturn:
    """Refuse zero-bubble. Its bubble is known, its memory is not: no modelled engine says what stays between the halves
    of a backward."""
    own, other = (bubble(schedule, options.pp, micro_batches) for schedule in ("zero-bubble", "1f1b"))
    refuse(
        "schedule",
        "zero-bubble",
        f"Megatron-Core has no such schedule, so its memory is not known (its bubble: {own:.1%} "
        f"of the ideal time, ZB-H1 with equal times; 1f1b's: {other:.1%}); allowed: gpipe, 1f1b, interleaved, or --engine fsdp2",
    )


def check_model(options: Options, dp: int, seq_len: int, name: str, model_type: str, config: object) -> None:
    """Raise InputError for a model that is not modelled, or whose dims do not divide as the layout needs."""
    if options.padded:
        refuse("padded", "on", f"with engine megatron {NOT_YET}off")
    if support_of(model_type).architecture is None:
        types = ", ".join(supporting(lambda s: s.architecture))
        refuse("engine", "megatron", f"for a {model_type} is not modelled by this version, only for {types}")
    why = _unfit(name, model_type, config)
    if why is not None:
        refuse("engine", "megatron", f"{why}; allowed: another engine")
    a = architecture_of(model_type, config)
    _check_tensor_parallel(options, name, a)
    _check_experts(options, dp, name, a)
    _check_stages(options, name, a)
    _check_sequence(options, seq_len)
    _check_context_parallel(options, name, a)
    why = None if options.attention != "flash" else unfit_for_flash(a)
    if why is not None:
        refuse(
            "attention", "flash", f"the flash-attn package needs {why} (get_attention_backend); allowed: sdpa, eager"
        )


def _unfit(name: str, model_type: str, config: object) -> str | None:
    """Return the reason why GPTModel is not this model; None if it is."""
    has = unfit(model_type, config)
    if has is not None:
        return f"{name} has {has}, which GPTModel lacks"
    support = support_of(model_type)
    activation, allowed = getattr(config, support.activation_field), support.megatron_activations
    if activation in allowed:
        return None
    return f"its fused kernels compute {' or '.join(allowed)}, and {name} uses {activation}"


def check_legacy_model(options: Options, name: str, model_type: str, config: object) -> None:
    """Raise InputError for a model that is not Megatron-DeepSpeed's GPTModel, or that DeepSpeed cannot cut as asked."""
    split = "tp" if options.tp > 1 else "pp"
    if not support_of(model_type).megatron_deepspeed:
        others = ", ".join(supporting(lambda s: s.megatron_deepspeed))
        why = f"with engine deepspeed, which then runs Megatron-DeepSpeed's GPTModel, a {model_type}"
        refuse(split, getattr(options, split), f"{why} {NOT_YET}1 (other values for {others})")
    why = _unfit(name, model_type, config)
    if why is not None:
        refuse(split, getattr(options, split), f"Megatron-DeepSpeed's GPTModel: {why}; allowed: 1")
    a = architecture_of(model_type, config)
    _check_tensor_parallel(options, name, a)
    if a.kv_heads % options.tp:
        refuse("tp", options.tp, f"{name} has {a.kv_heads} key/value heads; allowed: a divisor of {a.kv_heads}")
    if options.pp > a.layers:
        refuse("pp", options.pp, f"{name} has {a.layers} layers; allowed: 1 to {a.layers}")
    why = unfit_for_flash(a) if options.attention in (None, "flash") else None
    if why is not None:
        refuse("attention", "flash", f"the flash-attn package needs {why}; allowed: eager")


def unfit_for_flash(a: Architecture) -> str | None:
    """Return the operands that the flash-attn package needs and the model lacks (get_attention_backend); None if it
    lacks none."""
    if a.latent is not None:
        return "values as wide as keys"
    if a.head_dim > 256 or a.head_dim % 8:
        return f"a head_dim up to 256 that is a multiple of 8, not {a.head_dim}"
    return None


def _check_tensor_parallel(options: Options, name: str, a: Architecture) -> None:
    sizes = {"attention heads": a.heads, "ffn": a.ffn}
    if a.experts is not None and a.experts.shared_ffn:
        sizes["ffn of the shared experts"] = a.experts.shared_ffn
    for what, size in sizes.items():
        if size % options.tp:
            why = f"{name} has {size} {what}, and Megatron's tensor parallelism needs equal parts"
            refuse("tp", options.tp, f"{why}; allowed: a divisor of {gcd(*sizes.values())}")
    if a.mtp and a.hidden % options.tp:
        why = f"{name}'s layers of multi-token prediction project to {a.hidden} dims"
        refuse("tp", options.tp, f"{why}; allowed: a divisor of {a.hidden}")
    if a.kv_heads % options.tp and options.tp % a.kv_heads:
        why = f"{name} has {a.kv_heads} key/value heads"
        refuse("tp", options.tp, f"{why}; allowed: a divisor or a multiple of {a.kv_heads}")
    if (a.heads + 2 * a.kv_heads) * a.head_dim % options.tp:
        why = f"{name}'s joined queries, keys and values are {a.heads} + 2·{a.kv_heads} heads of {a.head_dim}"
        refuse("tp", options.tp, f"{why}, which tp does not divide")


def _check_experts(options: Options, dp: int, name: str, a: Architecture) -> None:
    experts, etp = a.experts, options.etp or options.tp
    if experts is None:
        for field in ("ep", "etp"):
            degree = getattr(options, field)
            if degree not in (None, 1) and not (field == "etp" and degree == options.tp):
                refuse(field, degree, f"{name} has no experts; allowed: 1")
        return
    if options.precision == "fp32":
        refuse("precision", "fp32", f"with engine megatron and experts {NOT_YET}bf16-mixed, fp16-mixed")
    if experts.count % options.ep:
        refuse("ep", options.ep, f"{name} has {experts.count} experts; allowed: a divisor of {experts.count}")
    if experts.ffn % etp:
        refuse("etp", etp, f"{name}'s experts have an ffn of {experts.ffn}; allowed: a divisor of {experts.ffn}")
    ranks = options.tp * options.cp * dp
    if ranks % (options.ep * etp):
        why = f"ep {options.ep} · etp {etp} = {options.ep * etp} does not divide tp {options.tp} · cp {options.cp} · dp {dp}"
        other = "" if etp == 1 else f", or with --etp 1 of {ranks}"
        allowed = f"a divisor of {ranks // etp or 1}{other}"
        refuse("ep", options.ep, f"{why} = {ranks}, the GPUs of a pipeline stage; allowed: {allowed}")
    _check_expert_instances(options, dp * options.cp, ranks // (options.ep * etp))
    if options.tp > 1 and options.sequence_parallel is False:
        refuse("sequence_parallel", "off", "Megatron needs it to train experts with tp > 1; allowed: on")


def _check_expert_instances(options: Options, ranks: int, expert_ranks: int) -> None:
    """Raise InputError if the experts' data-parallel ranks do not make as many optimizer instances as all other
    parameters' (parallel_state.py)."""
    group = options.shard_group
    if not options.zero or group is None or ranks % group or expert_ranks % (ranks // group) == 0:
        return
    why = f"{ranks // group} instances of the optimizer do not divide the experts' {expert_ranks} data-parallel ranks"
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0 and expert_ranks % (ranks // n) == 0]
    refuse("shard_group", group, f"{why}; allowed: {', '.join(map(str, fitting))}")


def _check_stages(options: Options, name: str, a: Architecture) -> None:
    stages, first, last = options.pp * options.virtual_stages, options.first_stage_layers, options.last_stage_layers
    written = options.stage_layers
    try:
        counts = layers_of_chunks(a.layers, stages, first, last, written)
    except ValueError:
        if first is not None or last is not None:
            _refuse_given_stages(options, name, a.layers)
        product = f" · virtual-stages {options.virtual_stages} = {stages}" if options.virtual_stages > 1 else ""
        why = f"{name} has {a.layers} layers, which do not make {stages} equal parts, with or without the embedding and the head"
        other = "" if options.virtual_stages > 1 else ", or --first-stage-layers, --last-stage-layers"
        allowed = f"a divisor of {a.layers}, {a.layers + 1} or {a.layers + 2}{other}"
        refuse("pp", f"{options.pp}{product}", f"{why}; allowed: {allowed}")
    if sum(counts) != a.layers:
        refuse("stage_layers", written, f"has {sum(counts)} layers, and {name} {a.layers}; allowed: {a.layers} in all")
    fewest = min(filter(None, counts))
    if options.recompute_layers is not None and options.recompute_layers > fewest:
        what = "chunk" if options.virtual_stages > 1 else "stage"
        why = f"the smallest {what} of {name} has {fewest} layer{'s' if fewest > 1 else ''}"
        refuse("recompute_layers", options.recompute_layers, f"{why}; allowed: 1 to {fewest}")


def _refuse_given_stages(options: Options, name: str, layers: int) -> NoReturn:
    """Refuse a given number of layers, and name the numbers with which the other stages are equal."""
    field = "last_stage_layers" if options.first_stage_layers is None else "first_stage_layers"
    given: int = getattr(options, field)
    other = 0 if field == "last_stage_layers" else options.last_stage_layers or 0
    others = options.pp - (2 if other else 1)
    if not others:
        refuse(field, given, f"{name} has {layers} layers and the last stage {other}; allowed: {layers - other}")
    fitting = [n for n in range(1, layers) if (rest := layers - other - n) > 0 and rest % others == 0]
    shown = ", ".join(map(str, fitting[:12])) or "no number"
    refuse(
        field,
        given,
        f"{name}'s other {layers - other - given} layers do not make {others} equal stages; allowed: {shown}",
    )


def _check_context_parallel(options: Options, name: str, a: Architecture) -> None:
    """Raise InputError for context parallelism that Transformer Engine refuses (context_parallel.py,
    attn_forward_func_with_cp and its callees)."""
    kind = options.cp_comm_type or "p2p"
    if options.cp == 1 or kind == "p2p":
        return
    exchanging = options.cp
    if kind == "a2a+p2p":
        exchanging = _check_exchanging(options)
    if a.latent is not None:
        refuse("cp_comm_type", kind, f"{name} has values and keys of different widths; allowed: p2p")
    if a.head_dim % 8:
        refuse("cp_comm_type", kind, f"{name}'s head_dim is {a.head_dim}, not a multiple of 8; allowed: p2p")
    heads = {"attention heads": a.heads // options.tp, "key/value heads": max(a.kv_heads // options.tp, 1)}
    for what, count in heads.items() if kind != "all_gather" else ():
        if count % exchanging:
            by = f"cp {options.cp}" if kind == "a2a" else f"cp-exchange-size {exchanging}"
            why = f"{name} has {count} {what} on a tensor-parallel rank, which are not divisible by {by}"
            refuse("cp_comm_type", kind, f"{why}; allowed: p2p, all_gather")


def _check_exchanging(options: Options) -> int:
    """Return the number of ranks that exchange heads. Raises InputError if it does not leave a ring
    (`--hierarchical-context-parallel-sizes`)."""
    size = options.cp_exchange_size
    fitting = ", ".join(str(n) for n in range(2, options.cp) if options.cp % n == 0)
    if size is None or str(size) not in fitting.split(", "):
        allowed = (
            f"allowed: a divisor of cp {options.cp}: {fitting}" if fitting else "allowed: --cp-comm-type p2p or a2a"
        )
        if size is None:
            refuse("cp_comm_type", "a2a+p2p", f"needs --cp-exchange-size, the ranks that exchange heads; {allowed}")
        refuse("cp_exchange_size", size, f"leaves no ring of cp {options.cp}; {allowed}")
    return size


def _check_sequence(options: Options, seq_len: int) -> None:
    sequence_parallel = options.tp > 1 if options.sequence_parallel is None else options.sequence_parallel
    unit = (options.tp if sequence_parallel else 1) * options.cp
    if options.cp > 1 and options.attention in ("eager", "unfused"):
        whose = "Megatron's own" if options.attention == "eager" else "Transformer Engine's unfused"
        why = f"{whose} attention has no context parallelism (cp {options.cp}); allowed: sdpa"
        refuse("attention", options.attention, why)
    if options.cp > 1 and options.precision == "fp32":
        why = f"Transformer Engine's attention in fp32 (unfused) has no context parallelism (cp {options.cp})"
        refuse("precision", "fp32", f"{why}; allowed: bf16-mixed, fp16-mixed")
    if options.cp > 1 and seq_len % (2 * options.cp):
        refuse("seq_len", seq_len, f"context parallelism needs a multiple of 2·cp = {2 * options.cp}")
    if seq_len % unit:
        refuse(
            "seq_len", seq_len, f"sequence parallelism needs a multiple of tp {options.tp} · cp {options.cp} = {unit}"
        )
