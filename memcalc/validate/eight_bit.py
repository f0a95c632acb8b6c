# pyright: basic
"""A module whose linear layers bitsandbytes keeps in 8 bits, and the 8-bit product as on CUDA.

The products are those of the CUDA backend, where the CPU backend has others: MatMul8bitLt, which keeps its input, in place of
MatMul8bitFp, and the functions of backends/cuda/ops.py and backends/default/ops.py, taken from their files, with kernels that
write nothing. No input has an outlier.
"""

from __future__ import annotations

import ast
import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Optional
from unittest.mock import patch

import torch

from memcalc.errors import InputError
from memcalc.quantized.chosen import base_dtype_name
from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.tracing.modules import cast_tensors
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.quantized import _bitsandbytes

if TYPE_CHECKING:
    from torch.nn import Module

    from memcalc.setup.setup import Setup

_CUDA: Final = ("int8_vectorwise_quant", "int8_mm_dequant", "int8_linear_matmul")
_DEFAULT: Final = ("int8_mixed_scaled_mm", "int8_scaled_mm")
"""The ops whose CUDA kernels are functions of each of the two files."""


def quantize(module: Any, setup: Setup) -> Module:
    """Return the module with the linear layers that transformers quantises in 8 bits (quantizer_bnb_8bit.py). Raises InputError
    without bitsandbytes."""
    import transformers
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    bnb = _bitsandbytes(setup)
    weights = dict(module.named_parameters(remove_duplicate=False))
    stay = HfQuantizer.get_modules_to_not_convert(module, None, module._keep_in_fp32_modules)
    module = replace_with_bnb_linear(module, stay, transformers.BitsAndBytesConfig(load_in_8bit=True))
    with products_of_cuda(setup):
        for path, layer in module.named_modules():
            if isinstance(layer, bnb.nn.Linear8bitLt):
                weight = weights[f"{path}.weight"].detach().to(DTYPES[BY_NAME[base_dtype_name(setup)]])
                weight = weight.t() if layer.source_cls is transformers.pytorch_utils.Conv1D else weight
                layer.weight = bnb.nn.Int8Params(weight, requires_grad=False)
                layer.weight._quantize(weight.device)
                if layer.bias is not None:
                    layer.bias = weights[f"{path}.bias"]
    module.is_loaded_in_8bit = True
    if setup.prepare_kbit_training:
        cast_tensors(module, torch.float32)
    return module.train()


def scales(module: Any) -> Iterator[torch.Tensor]:
    """Yield the scales of the rows. The weight has them until the first forward gives them to the layer."""
    for layer in module.modules():
        if type(layer).__name__ == "Linear8bitLt" and hasattr(layer, "state"):
            yield layer.weight.SCB if layer.state.SCB is None else layer.state.SCB


def dequantized_on_cuda(module: Any) -> Any:
    """Return peft's dequantised weight without what peft does on the CPU alone: move the weight, which makes it forget its
    scales."""
    from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight

    if type(module).__name__ != "Linear8bitLt":
        return dequantize_module_weight(module)
    return dequantize_bnb_weight(module.weight, state=module.state)


class _Op:
    """An op that is a function: bitsandbytes calls some ops themselves, and of others the overload."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.default = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.default(*args, **kwargs)


@contextlib.contextmanager
def products_of_cuda(setup: Setup) -> Iterator[None]:
    """Let 8-bit products be those of CUDA within a block. Raises InputError without bitsandbytes."""
    bnb = _bitsandbytes(setup)
    from bitsandbytes.autograd._functions import MatMul8bitLt

    def matmul(a: Any, b: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None) -> Any:
        if threshold > 0.0:
            state.threshold = threshold
        return MatMul8bitLt.apply(a, b, out, bias, state)

    said = logging.getLogger("bitsandbytes.autograd._functions")  # that it casts its inputs, in each product
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(said, "level", logging.ERROR))
        stack.enter_context(patch.object(bnb, "matmul", matmul))
        for name, function in _kernels(bnb).items():
            stack.enter_context(patch.object(torch.ops.bitsandbytes, name, _Op(function)))
        yield


def _kernels(bnb: Any) -> dict[str, Callable[..., Any]]:
    folder = Path(str(bnb.__file__)).parent / "backends"

    def writes_nothing(*_: Any) -> int:
        return 0

    names: dict[str, Any] = {
        "torch": torch, "prod": prod, "Optional": Optional, "_cuda_device_of": lambda _: nullcontext(),
        "_get_raw_stream": lambda _: 0, "CUBLAS_Context": SimpleNamespace(
            get_instance=lambda: SimpleNamespace(get_context=lambda _: None)
        ), "lib": SimpleNamespace(
            cigemmlt_32=writes_nothing, cdequant_mm_int32_fp16=writes_nothing, cint8_vector_quant=writes_nothing
        ),
    }  # fmt: skip
    out: dict[str, Callable[..., Any]] = {}
    for file, wanted in (("cuda", _CUDA), ("default", _DEFAULT)):
        own = dict(names)
        for node in ast.parse((folder / file / "ops.py").read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            of = _registered(node)
            if node.name == "_int8_linear_matmul_impl" or of in wanted:
                node.decorator_list = []
                exec(compile(ast.Module([node], []), file, "exec"), own)
            if of in wanted:
                out[of] = own["_"]
    if missing := {*_CUDA, *_DEFAULT} - set(out):
        raise InputError(f"--backend fake: bitsandbytes has no {min(missing)}; it needs bitsandbytes 0.50")
    return out


def _registered(function: ast.FunctionDef) -> str:
    """Return the op that a function is registered as a kernel of; '' if none."""
    for one in function.decorator_list:
        if isinstance(one, ast.Call) and one.args and isinstance(one.args[0], ast.Constant):
            return str(one.args[0].value).removeprefix("bitsandbytes::")
    return ""
