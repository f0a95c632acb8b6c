"""Refusals of frozen weights and adapters with Megatron: what Megatron does not train, and what is not modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.megatron.schedules import spans_of
from memcalc.quantized.chosen import base_dtype_name

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.megatron.gpt_model import GPTModel

_BRIDGE = "Megatron-Bridge's adapters (megatron/bridge/peft)"
_EMBEDDING = "embedding."


def check_tuning_of_megatron(options: Options, model: Model | None) -> None:
    """Raise InputError for frozen weights or adapters that Megatron does not train or that are not modelled."""
    name, value = ("lora_rank", options.lora_rank) if options.lora_rank else ("freeze", options.freeze)
    if options.optimizer == "muon":
        refuse("optimizer", "muon", f"with --{name.replace('_', '-')} and engine megatron {NOT_YET}adamw, adam")
    if options.wgrad_deferral_limit is not None:
        refuse("wgrad_deferral_limit", options.wgrad_deferral_limit, f"with frozen weights {NOT_YET}leave it out")
    beside = f"with --{name.replace('_', '-')} and engine megatron {NOT_YET}"
    if options.recompute_modules not in (None, "core_attn"):
        refuse("recompute_modules", options.recompute_modules, f"{beside}core_attn")
    if options.offload_modules is not None:
        refuse("offload_modules", options.offload_modules, f"{beside}leave it out")
    if options.lora_rank:
        _check_adapters(options)
    gpt: GPTModel | None = getattr(None if model is None else model.program, "gpt", None)
    if gpt is not None and not options.lora_rank:
        _check_bias(str(options.freeze), gpt)
        _check_recomputed(options, gpt)
    if gpt is not None:
        _check_stages(options, name, value, gpt)


def _check_adapters(options: Options) -> None:
    if options.dora:
        refuse("dora", True, f"of {_BRIDGE} {NOT_YET}off")
    if options.modules_to_save is not None:
        refuse(
            "modules_to_save", options.modules_to_save, "is peft's; Megatron-Bridge saves none; allowed: leave it out"
        )
    if options.lora_bias not in (None, "none"):
        refuse("lora_bias", options.lora_bias, "is peft's; Megatron-Bridge freezes all biases; allowed: none")
    base = base_dtype_name(options)
    if options.adapter_dtype not in (None, base):
        why = f"{_BRIDGE} have the model's dtype"
        refuse("adapter_dtype", options.adapter_dtype, f"{why}; allowed: {base}")
    if options.lora_rank % options.tp:
        why = f"{_BRIDGE} cut the rank into equal parts"
        refuse("lora_rank", options.lora_rank, f"with --tp {options.tp} {why}; allowed: a multiple of {options.tp}")


def _check_bias(text: str, gpt: GPTModel) -> None:
    """Refuse biases of joined queries, keys and values that train beside a frozen weight: they get no gradient
    (LinearWithFrozenWeight; Transformer Engine computes it with the weight's)."""
    for weight in gpt.weights():
        if weight.name.endswith("linear_qkv.bias") and gpt.wants_gradient(weight):
            own = weight._replace(name=f"{weight.name.removesuffix('bias')}weight")
            if not gpt.wants_gradient(own):
                why = "Megatron computes no gradient of linear_qkv.bias if linear_qkv.weight is frozen"
                refuse("freeze", text, f"{why} (core/tensor_parallel/layers.py); allowed: freeze both, or neither")


def _check_recomputed(options: Options, gpt: GPTModel) -> None:
    """Refuse recomputed layers whose input wants no gradient: nothing in them would train."""
    ends = [weight for weight in gpt.weights() if weight.name.startswith(_EMBEDDING) and gpt.wants_gradient(weight)]
    if options.recompute == "full" and not ends:
        why = "Megatron's checkpoint has no backward if its input wants no gradient (core/tensor_parallel/random.py)"
        refuse("recompute", "full", f"with frozen embeddings {why}; allowed: none, selective, or embeddings that train")


def _check_stages(options: Options, name: str, value: Any, gpt: GPTModel) -> None:
    """Refuse stages in which nothing trains: Megatron's optimizer would have no parameters there."""
    chunks = options.virtual_stages if options.schedule == "interleaved" else 1
    ends = options.first_stage_layers, options.last_stage_layers, options.stage_layers
    try:
        of_ranks = spans_of(gpt.layers, options.pp, chunks, *ends)
    except ValueError:  # refused by itself
        return
    trained = [weight for weight in gpt.weights() if gpt.wants_gradient(weight)]
    shares_experts = options.ep > 1
    for number, spans in enumerate(of_ranks):
        for span in spans:
            own = [w for w in trained if _is_in(w.layer, w.name, span.start, span.layers, span.first, span.last)]
            if not own:
                refuse(
                    name, value, f"stage {number} of --pp {options.pp} has nothing to train, which {NOT_YET}other parts"
                )
            if shares_experts and all(w.component == "experts" for w in own):
                refuse(
                    name, value, f"with --ep {options.ep}, of a stage that trains only experts, {NOT_YET}other parts"
                )


def _is_in(layer: int | None, name: str, start: int, layers: int, first: bool, last: bool) -> bool:
    if layer is not None:
        return start <= layer < start + layers
    return first if name.startswith(_EMBEDDING) else last
