"""A step of a model whose linear layers bitsandbytes keeps in 8 bits, as `validated.validate` runs one.

The modules are transformers' and peft's own. The products are those of the CUDA backend, where the CPU backend has others:
MatMul8bitLt, which keeps its input, in place of MatMul8bitFp, and the functions of backends/cuda/ops.py and
backends/default/ops.py, taken from their files, with kernels that write nothing. No input has an outlier.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import torch
import transformers

from memcalc.families import support_of
from memcalc.quantized.chosen import base_dtype_name
from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.setup.setup import Setup
from memcalc.tracing.modules import cast_tensors, configuration, on_meta, quiet
from memcalc.validate import fake, reference, run
from memcalc.validate.comparison import Comparison
from memcalc.validate.dtypes import DTYPES

CUDA = ("int8_vectorwise_quant", "int8_mm_dequant", "int8_linear_matmul")
DEFAULT = ("int8_mixed_scaled_mm", "int8_scaled_mm")
"""The ops whose CUDA kernels are functions of each of the two files."""


def validate(model: Any, **options: Any) -> Comparison:
    import peft.tuners.lora.dora

    with (
        patch.object(reference, "quantize", quantize),
        patch.object(reference, "quantized_states", quantized_states),
        patch.object(fake, "four_bit_products_of_cuda", products_of_cuda),
        patch.object(peft.tuners.lora.dora, "dequantize_module_weight", dequantized_on_cuda),
    ):
        return run.validate(model, **options)


def dequantized_on_cuda(module: Any) -> Any:
    """peft's own function without what it does on the CPU alone: move the weight, which makes it forget its scales."""
    from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight

    if type(module).__name__ != "Linear8bitLt":
        return dequantize_module_weight(module)
    return dequantize_bnb_weight(module.weight, state=module.state)


def quantize(module: Any, setup: Setup) -> Any:
    """The module with the linear layers that transformers quantises in 8 bits (quantizer_bnb_8bit.py)."""
    import bitsandbytes as bnb
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

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


def quantized_states(module: Any) -> Iterator[torch.Tensor]:
    """The scales of the rows. The weight has them until the first forward gives them to the layer."""
    for layer in module.modules():
        if type(layer).__name__ == "Linear8bitLt" and hasattr(layer, "state"):
            yield layer.weight.SCB if layer.state.SCB is None else layer.state.SCB


class Op:
    """An op that is a function: bitsandbytes calls some ops themselves, and of others the overload."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.default = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.default(*args, **kwargs)


@contextlib.contextmanager
def products_of_cuda(_: Setup) -> Iterator[None]:
    """Let 8-bit products be those of CUDA."""
    import bitsandbytes as bnb
    from bitsandbytes.autograd._functions import MatMul8bitLt

    def matmul(a: Any, b: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None) -> Any:
        if threshold > 0.0:
            state.threshold = threshold
        return MatMul8bitLt.apply(a, b, out, bias, state)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(bnb, "matmul", matmul))
        for name, function in _kernels().items():
            stack.enter_context(patch.object(torch.ops.bitsandbytes, name, Op(function)))
        yield


def _kernels() -> dict[str, Callable[..., Any]]:
    import bitsandbytes as bnb

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
    for file, wanted in (("cuda", CUDA), ("default", DEFAULT)):
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
    assert set(out) == {*CUDA, *DEFAULT}
    return out


def _registered(function: ast.FunctionDef) -> str:
    """The op that a function is registered as a kernel of."""
    for one in function.decorator_list:
        if isinstance(one, ast.Call) and one.args and isinstance(one.args[0], ast.Constant):
            return str(one.args[0].value).removeprefix("bitsandbytes::")
    return ""


def replaced(fields: dict[str, Any]) -> list[str]:
    """The names of the modules that are quantised, by transformers' own rule (quantizer_bnb_8bit.py)."""
    import bitsandbytes  # noqa: F401  (transformers' own code uses it)
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    config = configuration(fields["model_type"], {k: v for k, v in fields.items() if k != "model_type"})
    with quiet(), torch.device("meta"):
        named = support_of(fields["model_type"]).auto_class
        model: Any = on_meta(config) if named is None else getattr(transformers, named).from_config(config)
        stay = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        model = replace_with_bnb_linear(model, stay, transformers.BitsAndBytesConfig(load_in_8bit=True))
    return [name for name, module in model.named_modules() if type(module).__name__ == "Linear8bitLt"]


def stored(shape: tuple[int, int]) -> list[tuple[list[int], str]]:
    """The tensors that hold a weight, codes first: real ones of a small weight."""
    import bitsandbytes as bnb

    weight = bnb.nn.Int8Params(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False)
    weight._quantize(torch.device("cpu"))
    assert weight.data.data_ptr() == weight.CB.data_ptr()
    return [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in (weight.data, weight.SCB)]
