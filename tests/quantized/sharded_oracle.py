"""A step over a base in 4 bits whose codes an engine shards, as `validated.validate` runs one.

The modules are transformers', peft's and bitsandbytes' own, sharded by torch's `fully_shard`; codes are in the setup's
`quantize_storage`. What is not quantised is in the base's dtype, as launchers load it, and adapters are in fp32, as peft makes
them. Codes in uint8 are `ignored_params`, as accelerate has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from memcalc.quantized.chosen import base_dtype_name
from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.setup.setup import Setup
from memcalc.tracing.modules import cast_tensors
from memcalc.validate import deepspeed, engines, reference, run
from memcalc.validate.comparison import Comparison
from memcalc.validate.dtypes import DTYPES


def dequantized_on_cuda(module: Any) -> Any:
    """peft's own function without what it does on the CPU alone: make another weight, of which an engine knows nothing."""
    from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight

    if type(module.weight).__name__ != "Params4bit":
        return dequantize_module_weight(module)
    return dequantize_bnb_weight(module.weight, state=module.weight.quant_state)


def validate(model: Any, **options: Any) -> Comparison:
    for name in ("bitsandbytes", "peft", *(["deepspeed"] if options["engine"] == "deepspeed" else [])):
        pytest.importorskip(name)
    import peft.tuners.lora.dora

    with (
        patch.object(peft.tuners.lora.dora, "dequantize_module_weight", dequantized_on_cuda),
        patch.object(reference, "quantize", quantize),
        patch.object(reference, "quantized_states", quantized_states),
        patch.object(engines, "fully_shard", fully_shard),
        patch.object(deepspeed, "kept_tensors", kept_tensors),
    ):
        return run.validate(model, **options)


def fully_shard(module: Any, **how: Any) -> Any:
    """torch's own, with the codes that accelerate leaves out (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model)."""
    from torch.distributed.fsdp import fully_shard as of_torch

    ignored = {p for p in module.parameters() if type(p).__name__ == "Params4bit" and not p.is_floating_point()}
    return of_torch(module, **how, ignored_params=ignored) if ignored else of_torch(module, **how)


_kept_tensors = deepspeed.kept_tensors


def kept_tensors(job: Any) -> Any:
    """What is alive between two steps of DeepSpeed, the scales among the parameters of stage 3 too."""
    kept = _kept_tensors(job)
    if not any(hasattr(p, "ds_tensor") for p in job.parameters()):
        return kept
    return kept._replace(parameters=[*kept.parameters, *quantized_states(job.modules[0])])


def quantize(module: Any, setup: Setup) -> Any:
    """The module with the linear layers that transformers quantises in 4 bits (quantizer_bnb_4bit.py)."""
    import bitsandbytes as bnb
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    base = DTYPES[BY_NAME[base_dtype_name(setup)]]
    if setup.engine == "fsdp2":  # DeepSpeed casts parameters itself
        cast_tensors(module, base)
    weights = dict(module.named_parameters(remove_duplicate=False))
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=setup.quantize,
        bnb_4bit_use_double_quant=setup.double_quant,
        bnb_4bit_compute_dtype=DTYPES[BY_NAME[setup.quantize_compute_dtype or "fp32"]],
        bnb_4bit_quant_storage={"uint8": torch.uint8, **{n: DTYPES[BY_NAME[n]] for n in ("fp32", "bf16", "fp16")}}[
            str(setup.quantize_storage)
        ],
    )
    stay = HfQuantizer.get_modules_to_not_convert(module, None, module._keep_in_fp32_modules)
    module = replace_with_bnb_linear(module, stay, how)
    for path, layer in module.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = weights[f"{path}.weight"].detach().to(base)
            weight = weight.t() if layer.source_cls is transformers.pytorch_utils.Conv1D else weight
            layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **layer.weight.__dict__)
            with of_cuda():
                layer.weight._quantize(weight.device)
            if layer.bias is not None:
                layer.bias = weights[f"{path}.bias"]
    module.is_loaded_in_4bit = True
    if setup.prepare_kbit_training:
        prepare(module)
    return module.train()


def prepare(module: Any) -> None:
    """Cast what peft's prepare_model_for_kbit_training casts: all parameters but codes, whatever dtype these have; and the
    buffers, as where the base is not sharded."""
    codes: dict[Any, Any] = {}
    for layer in module.modules():
        if type(getattr(layer, "weight", None)).__name__ == "Params4bit":
            codes[layer] = layer._parameters.pop("weight")
    cast_tensors(module, torch.float32)
    for layer, weight in codes.items():
        layer.weight = weight


@contextmanager
def of_cuda() -> Iterator[None]:
    """Let codes have the shape that CUDA's kernel gives them (bitsandbytes/backends/cuda/ops.py, quantize_4bit). The CPU's
    cannot keep an odd number of bytes in a wider dtype."""
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


def quantized_states(module: Any) -> Iterator[torch.Tensor]:
    """The scales. The layer has them: the parameter that FSDP2 makes of its weight does not."""
    import bitsandbytes as bnb

    for layer in module.modules():
        state = layer.quant_state if isinstance(layer, bnb.nn.Linear4bit) else None
        if state is not None:
            yield from (state.absmax, state.code)
            if state.nested:
                yield from (state.offset, state.state2.absmax, state.state2.code)
