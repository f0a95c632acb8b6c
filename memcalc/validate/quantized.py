# pyright: basic
"""A module whose linear layers bitsandbytes quantises, and the 4-bit product as on CUDA."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memcalc.errors import InputError, one_line
from memcalc.quantized.chosen import base_dtype_name
from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.tracing.modules import cast_tensors
from memcalc.validate.dtypes import DTYPES

if TYPE_CHECKING:
    from torch.nn import Module

    from memcalc.setup.setup import Setup


def quantize(module: Any, setup: Setup) -> Module:
    """Return the module with the linear layers that transformers quantises in 4 bits. Raises InputError without
    bitsandbytes."""
    import transformers
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    bnb = _bitsandbytes(setup)
    weights = dict(module.named_parameters(remove_duplicate=False))
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=setup.quantize,
        bnb_4bit_use_double_quant=setup.double_quant,
        bnb_4bit_compute_dtype=DTYPES[BY_NAME[setup.quantize_compute_dtype or "fp32"]],
    )
    stay = HfQuantizer.get_modules_to_not_convert(module, None, module._keep_in_fp32_modules)
    module = replace_with_bnb_linear(module, stay, how)
    for path, layer in module.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = weights[f"{path}.weight"].detach()
            weight = weight.to(DTYPES[BY_NAME[base_dtype_name(setup)]])
            weight = weight.t() if layer.source_cls is transformers.pytorch_utils.Conv1D else weight
            layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **layer.weight.__dict__)
            layer.weight._quantize(weight.device)
            if layer.bias is not None:
                layer.bias = weights[f"{path}.bias"]
    module.is_loaded_in_4bit = True
    if setup.prepare_kbit_training:
        cast_tensors(module, torch.float32)
    return module.train()


def _bitsandbytes(setup: Setup) -> Any:
    try:
        import bitsandbytes
    except Exception as error:  # the import loads a library, which can fail in any way
        why = f"needs pip install bitsandbytes to be run ({one_line(error)})"
        raise InputError(f"--quantize {setup.quantize}: {why}") from None
    return bitsandbytes


def quantized_states(module: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors beside the codes that hold the quantised weights of a module."""
    for parameter in module.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code)
            if state.nested:
                yield from (state.offset, state.state2.absmax, state.state2.code)


@contextlib.contextmanager
def four_bit_products_of_cuda(setup: Setup) -> Iterator[None]:
    """Let 4-bit products allocate what they do on CUDA, where they are one op to torch."""
    if setup.quantize == "none":
        yield
        return
    _bitsandbytes(setup)
    on_cuda = _dequant_linear_fallback()
    op: Any = torch.ops.bitsandbytes.gemm_4bit
    before = op.default

    def gemm_4bit(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):  # it runs below autocast's dispatch
            return on_cuda(*args, **kwargs)

    op.default = gemm_4bit
    try:
        yield
    finally:
        op.default = before


def _dequant_linear_fallback() -> Callable[..., torch.Tensor]:
    """Return the CUDA backend's own function. Its file can only be imported where torch has CUDA, so it is taken from the file,
    with kernels that write nothing."""
    found = find_spec("bitsandbytes")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "backends" / "cuda" / "ops.py"
    named = "_dequant_linear_fallback"
    code: list[Any] = [
        f for f in ast.parse(file.read_text()).body if isinstance(f, ast.FunctionDef) and f.name == named
    ]
    if not code:
        raise InputError(f"--backend fake: bitsandbytes has no {named}; it needs bitsandbytes 0.50")

    def writes_nothing(*_: Any, **__: Any) -> None: ...

    names: dict[str, Any] = {
        "torch": torch, "_dequantize_blockwise_impl": writes_nothing, "_dequantize_4bit_impl": writes_nothing,
    }  # fmt: skip
    exec(compile(ast.Module(code, []), str(file), "exec"), names)
    return names[named]
