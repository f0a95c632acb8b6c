"""Refusals of quantised bases, and their options as they are resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.quantized.chosen import base_dtype_name, compute_dtype_name
from memcalc.setup.quantized_shards import check_sharded, storage_name

if TYPE_CHECKING:
    from memcalc.families.base.linear_modules import Place
    from memcalc.inputs.model import Model

_OF_FOUR_BITS: Final = ("double_quant", "quantize_compute_dtype", "quantize_storage")
_DIMS_OF_INT8: Final = (2, 3)
_CLIPPED: Final = ("q_proj", "k_proj", "v_proj")
_OF_QUANTISED: Final = (*_OF_FOUR_BITS, "prepare_kbit_training")


def check_quantized(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for quantised bases that nobody trains, or that are not modelled."""
    kind = options.quantize
    _check_base_dtype(options, engine)
    for name in _OF_QUANTISED:
        if getattr(options, name) and kind == "none":
            allowed = f"allowed: with --quantize {_kinds_with(name)}"
            refuse(name, getattr(options, name), f"is an option of quantised weights; {allowed}")
    if kind == "none":
        return
    for name in _OF_FOUR_BITS:
        if getattr(options, name) and kind == "int8":
            refuse(name, getattr(options, name), "is an option of 4-bit weights; allowed: with --quantize nf4, fp4")
    if not options.lora_rank:
        refuse("quantize", kind, "quantised weights do not train; allowed: with --lora-rank 1 or more")
    if engine not in ("none", "ddp", "deepspeed", "fsdp2"):
        refuse("quantize", kind, f"with engine {engine} {NOT_YET}with --engine none, ddp, deepspeed, fsdp2")
    if options.cp > 1:
        refuse("quantize", kind, f"with --cp {options.cp} {NOT_YET}--cp 1")
    if options.recompute == "op":
        refuse("recompute", "op", f"with --quantize {kind} {NOT_YET}none, full")
    check_sharded(options, engine)
    if options.prepare_kbit_training and base_dtype_name(options) == "fp32":
        refuse(
            "prepare_kbit_training", True, "casts 16-bit weights, and all are fp32; allowed: off, or --base-dtype bf16"
        )
    if options.prepare_kbit_training and options.adapter_dtype not in (None, "fp32"):
        why = "over a base that --prepare-kbit-training has cast to fp32"
        refuse("adapter_dtype", options.adapter_dtype, f"{why} {NOT_YET}fp32")
    from memcalc.quantized.targets import NOT_MODELLED, quantized_places  # quantised bases are rare

    if model is not None and (model.program.source or model.model_type in NOT_MODELLED):
        how = "which is traced," if model.program.source else "not all of whose linear layers are called,"
        refuse("quantize", kind, f"for a {model.model_type}, {how} {NOT_YET}none")
    if model is not None and kind == "int8":
        _check_inputs(model)
    if model is not None and options.modules_to_save is not None:
        packed, adapters = quantized_places(model.whole.program, model.model_type), model.program.adapters
        saved = next((path for path, layer in packed if adapters is not None and adapters.saves(path, layer)), None)
        if saved is not None:
            why = f"{saved} is quantised, and codes do not train"
            refuse("modules_to_save", options.modules_to_save, f"{why}; allowed: embeddings, norms, the head")


def _check_inputs(model: Model) -> None:
    """Raise InputError for a layer whose input bitsandbytes' product of 8-bit codes does not take (backends/cuda/ops.py,
    int8_linear_matmul)."""
    from memcalc.quantized.targets import quantized_places

    for (path, layer), call in quantized_places(model.whole.program, model.model_type).items():
        if call.dims not in _DIMS_OF_INT8:
            why = f"for a {model.model_type}: {path} has an input of {call.dims} dims, and bitsandbytes takes 2 or 3"
            refuse("quantize", "int8", f"{why}; allowed: none, nf4, fp4")
        if path.endswith(_CLIPPED) and _clips_in_place(model) and not _is_adapted(model, (path, layer)):
            why = f"for a {model.model_type}: clip_qkv writes into the result of {path}, a view that torch does not let it"
            refuse(
                "quantize", "int8", f"{why}; allowed: none, nf4, fp4, or --lora-targets of q_proj, k_proj and v_proj"
            )


def _clips_in_place(model: Model) -> bool:
    """Tell whether forward clips projections in place (models/olmo/modeling_olmo.py, olmoe/modeling_olmoe.py)."""
    return model.model_type in ("olmo", "olmoe") and model.program.config.clip_qkv is not None


def _is_adapted(model: Model, place: Place) -> bool:
    """Tell whether peft adds an adapter's result to a layer's, which makes a new tensor."""
    adapters = model.program.adapters
    return adapters is not None and adapters.has(*place)


def _kinds_with(name: str) -> str:
    return "nf4, fp4" if name in _OF_FOUR_BITS else "nf4, fp4, int8"


def _check_base_dtype(options: Options, engine: str) -> None:
    """Raise InputError for a base of another dtype than the precision says, if that is no frozen base under autocast."""
    given = options.base_dtype
    if given is None or given == base_dtype_name(options._replace(base_dtype=None)):
        return
    if engine == "fsdp2" and options.quantize != "none" and options.precision.endswith("-mixed"):
        return
    if not options.precision.endswith("-autocast"):
        natural = base_dtype_name(options._replace(base_dtype=None))
        refuse("base_dtype", given, f"with --precision {options.precision} the base is {natural}; allowed: {natural}")
    if not options.lora_rank:
        refuse("base_dtype", given, f"for weights that train under {options.precision} {NOT_YET}fp32, or --lora-rank 1")
    if engine not in ("none", "ddp"):
        refuse("base_dtype", given, f"with engine {engine} {NOT_YET}fp32")


def quantized_options(options: Options, engine: str) -> dict[str, Any]:
    """Return the options of a quantised base as they are resolved."""
    return {
        "base_dtype": options.base_dtype,
        "quantize": options.quantize,
        "double_quant": options.double_quant,
        "quantize_compute_dtype": None if options.quantize in ("none", "int8") else compute_dtype_name(options),
        "prepare_kbit_training": options.prepare_kbit_training,
        "quantize_storage": None if options.quantize in ("none", "int8") else storage_name(options, engine),
    }
