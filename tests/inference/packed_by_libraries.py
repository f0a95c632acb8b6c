"""The tensors of quantised layers that the libraries make, which are not installed with the tests.

    PYTHONPATH=... python tests/inference/packed_by_libraries.py > tests/inference/packed_tensors.json

writes what auto-gptq, autoawq and compressed-tensors make of small layers, on the CPU. The packages' own code runs; the
kernels that it would call do not exist there, and it does not call them to make a layer.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Case = dict[str, Any]
SIZES = ((64, 96), (128, 256), (256, 160))
"""Inputs and outputs."""


def _place(package: str, *path: str) -> Path:
    """A file of a package, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).joinpath(*path)


def _loaded(place: Path) -> Any:
    """A module of a package, loaded without the package's own imports."""
    of = importlib.util.spec_from_file_location(f"_{place.stem}", place)
    assert of is not None and of.loader is not None
    module = importlib.util.module_from_spec(of)
    of.loader.exec_module(module)
    return module


def _shown(named: Any) -> list[tuple[str, list[int], str]]:
    return [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named]


def gptq() -> Iterator[Case]:
    made = _loaded(_place("auto_gptq", "nn_modules", "qlinear", "qlinear_cuda.py")).QuantLinear
    for bits in (2, 3, 4, 8):
        for group in (32, 64, 128, -1):
            for fan_in, out in SIZES:
                if group == -1 or not fan_in % group:
                    layer = made(bits, group, fan_in, out, bias=False)
                    yield {
                        "bits": bits,
                        "group": group,
                        "sizes": [fan_in, out],
                        "tensors": _shown(layer.named_buffers()),
                    }


def awq() -> Iterator[Case]:
    """AutoAWQ's layers. Its package imports kernels, of which stand-ins are in their places: no layer is run."""
    stand_ins: dict[str, dict[str, Any]] = {
        "awq": {}, "awq.utils": {}, "awq.modules": {}, "awq.modules.triton": {},
        "awq.utils.module": {"try_import": lambda _: (None, "")},
        "awq.utils.utils": {"get_best_device": lambda: "cpu"},
        "awq.utils.packing_utils": {"dequantize_gemm": None},
        "awq.modules.triton.gemm": {"awq_gemm_triton": None, "awq_dequantize_triton": None},
    }  # fmt: skip
    place = _place("awq", "modules", "linear", "gemm.py")
    for name, content in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    made = _loaded(place).WQLinear_GEMM
    for group in (32, 64, 128, -1):
        for fan_in, out in SIZES:
            if group == -1 or not fan_in % group:
                layer = made(4, group, fan_in, out, False, "cpu")
                yield {"bits": 4, "group": group, "sizes": [fan_in, out], "tensors": _shown(layer.named_buffers())}


SCHEMES: dict[str, Case] = {
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
    "int8 channel": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int4 group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4 channel": {"num_bits": 4, "type": "int", "strategy": "channel"},
    "int4 group zeros": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


def compressed() -> Iterator[Case]:
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

    for name, given in SCHEMES.items():
        for fan_in, out in SIZES:
            inputs = None
            if name == "int8 channel":
                inputs = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
            scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given), input_activations=inputs)
            layer = torch.nn.Linear(fan_in, out, bias=False, dtype=torch.bfloat16)
            initialize_module_for_quantization(layer, scheme, force_zero_point=False)
            with torch.no_grad():
                for key, value in layer.named_parameters():
                    if key != "weight":
                        value.fill_(1)
            compress_module(layer)
            shown = [*_shown(layer.named_parameters()), *_shown(layer.named_buffers())]
            yield {"scheme": given, "inputs": name == "int8 channel", "sizes": [fan_in, out], "tensors": shown}


MADE: dict[str, Callable[[], Iterator[Case]]] = {
    "auto-gptq 0.7.1": gptq,
    "autoawq 0.2.9": awq,
    "compressed-tensors 0.20.0": compressed,
}

if __name__ == "__main__":
    print(json.dumps({name: list(of()) for name, of in MADE.items()}, indent=None, separators=(",", ":")))
