# pyright: basic
"""transformers' own model of a config.json: on the meta device to read its parts, of fake tensors to run.

The class that the config.json's `architectures` names is built, if one of three auto classes has it for this type. Else
the first existing one is built of AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM, in this order.
Remote code is never used: an `auto_map` is ignored.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch.nn import Module, ModuleList, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto.auto_factory import _get_model_class

from memcalc.core.dims import Shape
from memcalc.core.dtypes import DType, bf16, boolean, fp16, fp32, fp64, int32, int64, uint8
from memcalc.tracing.description import Described, Description, place, shape_of

TRANSFORMERS = f"transformers {transformers.__version__}"
TORCH = f"torch {torch.__version__.split('+')[0]}"

_AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM)

_DTYPES = {
    torch.float64: fp64, torch.float32: fp32, torch.bfloat16: bf16, torch.float16: fp16,
    torch.int64: int64, torch.int32: int32, torch.uint8: uint8, torch.bool: boolean,
}  # fmt: skip
_TORCH_DTYPES = {ours: theirs for theirs, ours in _DTYPES.items()}


# --- configurations


def known_types() -> tuple[str, ...]:
    """Return every `model_type` that transformers has a configuration for."""
    return tuple(transformers.CONFIG_MAPPING)


def configuration(model_type: str, fields: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a config.json's fields. Wrong fields can raise any exception."""
    kept = {name: value for name, value in fields.items() if name not in ("model_type", "auto_map")}
    with quiet():
        return AutoConfig.for_model(model_type, **copy.deepcopy(kept))


def auto_class(config: Any) -> Any:
    """Return the auto class that builds a configuration's model; None if transformers has no language model for it."""
    having = [auto for auto in _AUTO_CLASSES if type(config) in auto._model_mapping]
    names = [_get_model_class(config, auto._model_mapping).__name__ for auto in having]
    named = [auto for auto, name in zip(having, names, strict=True) if name in (config.architectures or ())]
    return next(iter(named + having), None)


# --- models


def on_meta(config: Any) -> Module:
    """Return the model on the meta device: names and shapes only."""
    with quiet(), torch.device("meta"):
        return _from_config(config, dtype=torch.float32)


def to_run(config: Any, attention: str, dtype: DType, auto: Any = None) -> Module:
    """Return the model as it is trained: all of one dtype, without the key-value cache. `auto` replaces the auto class
    that the rule chooses."""
    model = _from_config(config, auto, attn_implementation=attention, dtype=_TORCH_DTYPES[dtype])
    cast_tensors(model, _TORCH_DTYPES[dtype])
    return model.train()


def _from_config(config: Any, auto: Any = None, **choices: Any) -> Module:
    config = copy.deepcopy(config)  # from_config changes it
    config.use_cache = False
    return (auto or auto_class(config)).from_config(config, **choices)


def cast_tensors(model: Module, dtype: torch.dtype) -> None:
    """Cast a model as `model.to(dtype)` does, which fails on fake tensors. Most tensors have this dtype already."""
    made: dict[int, Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in made:
                    made[id(parameter)] = Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of transformers and torch within a block."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    ops = logging.getLogger("torch._subclasses.fake_tensor")  # an op's message is in its exception too
    disabled, ops.disabled = ops.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        ops.disabled = disabled


# --- the parts of a model


def describe(config: Any) -> Description:
    """Return the description of a model before it is run."""
    model = on_meta(config)
    text = config.get_text_config()
    limit = _positions_limit(model, text)
    paths = stacks(model)
    parameters = [Described(place(name, paths), tuple(p.shape), None) for name, p in model.named_parameters()]
    buffers = [
        Described(place(name, paths), tuple(b.shape), None if b.is_floating_point() else dtype_of(b.dtype))
        for name, b in model.named_buffers()
    ]
    # An encoder and a decoder are two stacks; the configuration's number counts only one.
    layers = None if config.is_encoder_decoder else getattr(text, "num_hidden_layers", None)
    in_stacks = {(p.at.name.split("*")[0], p.at.layer) for p in parameters if p.at.layer is not None}
    return Description(
        class_name=type(model).__name__,
        layers=layers if isinstance(layers, int) and layers > 0 else len(in_stacks),
        attention_kinds=("sdpa", "eager") if model._supports_sdpa else ("eager",),
        max_seq_len=limit or _positions(text),
        positions_limit=limit,
        experts_per_token=_experts_per_token(text),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
    )


def stacks(model: Module) -> frozenset[str]:
    """Return the paths of the lists of layers: lists of modules that have submodules."""
    return frozenset(
        path
        for path, module in model.named_modules()
        if isinstance(module, ModuleList) and all(next(layer.children(), None) is not None for layer in module)
    )


def _positions(config: Any) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _positions_limit(model: Module, config: Any) -> int | None:
    """Return the longest sequence if positions are looked up in a table; None otherwise. A table with a padding index
    starts after it."""
    positions = _positions(config)
    for path, module in model.named_modules():
        tables = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, table in tables:
            words = f"{path}.{name}".lower()
            if (
                positions is not None
                and table.dim() == 2
                and table.shape[0] >= positions
                and ("pos" in words or "wpe" in words)
            ):
                padding = getattr(module, "padding_idx", None)
                return min(positions, table.shape[0] - (0 if padding is None else padding + 1))
    return None


def _experts_per_token(config: Any) -> int | None:
    names = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k", "moe_k")
    found = (getattr(config, name, None) for name in names)
    return next((count for count in found if isinstance(count, int)), None)


# --- sizes


@cache
def dtype_of(dtype: torch.dtype) -> DType:
    """Return memcalc's element type, or a new one if memcalc has none (complex, integers of 8 and 16 bits)."""
    return _DTYPES.get(dtype) or DType(str(dtype).removeprefix("torch."), dtype.itemsize, dtype.is_floating_point)


def storage_shape(tensor: torch.Tensor) -> Shape:
    """Return the tensor's shape if it fills its storage; else the storage as one dim."""
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.itemsize == nbytes:
        return shape_of(tuple(tensor.shape))
    return shape_of((-(-nbytes // tensor.itemsize),))
