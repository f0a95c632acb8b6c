# pyright: basic
"""A base in 4 bits whose codes FSDP2 or ZeRO-3 shards: codes in the setup's `quantize_storage`, scales that every rank keeps.

What is not quantised is in the base's dtype, as launchers load it, and adapters are in fp32, as peft makes them. FSDP2 leaves
codes in uint8 out (`ignored_params`), as accelerate has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from memcalc.quantized.chosen import base_dtype_name
from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.tracing.modules import cast_tensors
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.quantized import _bitsandbytes

if TYPE_CHECKING:
    from torch.nn import Module

    from memcalc.setup.setup import Setup


def quantize(module: Any, setup: Setup) -> Module:
    """Return the module with the linear layers that transformers quantises in 4 bits (quantizer_bnb_4bit.py). Raises InputError
    without bitsandbytes."""
    import transformers
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    bnb = _bitsandbytes(setup)
    base = DTYPES[BY_NAME[base_dtype_name(setup)]]
    if setup.engine == "fsdp2":  # DeepSpeed casts parameters itself
        cast_tensors(module, base)
    weights = dict(module.named_parameters(remove_duplicate=False))
    storage = str(setup.quantize_storage)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=setup.quantize,
        bnb_4bit_use_double_quant=setup.double_quant,
        bnb_4bit_compute_dtype=DTYPES[BY_NAME[setup.quantize_compute_dtype or "fp32"]],
        bnb_4bit_quant_storage=torch.uint8 if storage == "uint8" else DTYPES[BY_NAME[storage]],
    )
    stay = HfQuantizer.get_modules_to_not_convert(module, None, module._keep_in_fp32_modules)
    module = replace_with_bnb_linear(module, stay, how)
    for path, layer in module.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = weights[f"{path}.weight"].detach().to(base)
            weight = weight.t() if layer.source_cls is transformers.pytorch_utils.Conv1D else weight
            layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **layer.weight.__dict__)
            with _codes_of_cuda():
                layer.weight._quantize(weight.device)
            if layer.bias is not None:
                layer.bias = weights[f"{path}.bias"]
    module.is_loaded_in_4bit = True
    if setup.prepare_kbit_training:
        _prepare(module)
    return module.train()


def _prepare(module: Any) -> None:
    """Cast what peft's prepare_model_for_kbit_training casts: all parameters but codes, whatever dtype these have; and the
    buffers, as where the base is not sharded."""
    codes: dict[Any, Any] = {}
    for layer in module.modules():
        if type(getattr(layer, "weight", None)).__name__ == "Params4bit":
            codes[layer] = layer._parameters.pop("weight")
    cast_tensors(module, torch.float32)
    for layer, weight in codes.items():
        layer.weight = weight


@contextlib.contextmanager
def _codes_of_cuda() -> Iterator[None]:
    """Let codes have the shape that CUDA's kernel gives them within a block (bitsandbytes/backends/cuda/ops.py, quantize_4bit).
    The CPU's cannot keep an odd number of bytes in a wider dtype."""
    op: Any = torch.ops.bitsandbytes.quantize_4bit
    before = op.default

    def quantize_4bit(a: torch.Tensor, blocksize: int, quant_type: str, storage: torch.dtype) -> Any:
        codes = torch.empty(((a.numel() + 1) // (storage.itemsize * 2), 1), dtype=storage)
        return codes, torch.empty((-(a.numel() // -blocksize),), dtype=torch.float32)

    op.default = quantize_4bit
    try:
        yield
    finally:
        op.default = before


def scales(module: Any) -> Iterator[torch.Tensor]:
    """Yield the scales and their tables. The layer has them: the parameter that FSDP2 makes of its weight does not."""
    for layer in module.modules():
        state = getattr(layer, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code)
            if state.nested:
                yield from (state.offset, state.state2.absmax, state.state2.code)


def left_out(module: Any) -> set[Any]:
    """Return the codes that FSDP2 leaves out (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model)."""
    return {p for p in module.parameters() if type(p).__name__ == "Params4bit" and not p.is_floating_point()}


def dequantized_on_cuda(module: Any) -> Any:
    """Return peft's dequantised weight without what peft does on the CPU alone: make another weight, of which an engine knows
    nothing."""
    from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight

    if type(module.weight).__name__ != "Params4bit":
        return dequantize_module_weight(module)
    return dequantize_bnb_weight(module.weight, state=module.weight.quant_state)
