"""The stand-ins of Megatron-Bridge's adapters against the real ParallelLinearAdapter and LoRALinear, where they are installed.

`pip install --no-deps megatron-bridge` is enough: of the package only megatron/bridge/peft is loaded, without its models.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import megatron_lora_stand_ins as stand_ins
import pytest
import torch
from megatron_tuned_oracle import TARGETS, Ran, tuned_step

from memcalc.families.base.architecture import Architecture

LLAMA = Architecture(
    layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False,
)  # fmt: skip


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """megatron.bridge.peft's utils and lora_layers; None if the package is not there."""
    yield _loaded(monkeypatch)
    for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
        del sys.modules[name]


def _loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("megatron") is None:
        return None
    spec = importlib.util.find_spec("megatron.bridge")
    if spec is None or spec.submodule_search_locations is None:
        return None
    for name in ("megatron.bridge", "megatron.bridge.peft"):
        module = ModuleType(name)
        folder = next(iter(spec.submodule_search_locations)) + ("/peft" if name.endswith("peft") else "")
        module.__path__ = [folder]
        monkeypatch.setitem(sys.modules, name, module)
    utils = importlib.import_module("megatron.bridge.peft.utils")
    engine, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.ops, engine.pytorch = torch.nn.Linear, ModuleType("ops"), pytorch  # type: ignore[attr-defined]
    pytorch.ops.Sequential = torch.nn.Sequential  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformer_engine", engine)
        patched.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
        layers = importlib.import_module("megatron.bridge.peft.lora_layers")
    column, row = stand_ins.TELayerNormColumnParallelLinear, stand_ins.TERowParallelLinear
    for name, value in {
        "HAVE_TE": True, "TELayerNormColumnParallelLinear": column, "TECL": (column,), "TERL": (row,),
        "version": lambda _: "2.11.0",
    }.items():  # fmt: skip
        monkeypatch.setattr(utils, name, value)
    return utils, layers


def with_real_adapters(bridge: Any, dim: int, dropout: float) -> Any:
    """LoRA.transform of megatron/bridge/peft/lora.py."""
    utils, layers = bridge

    def adapt(model: Any) -> None:
        for number, layer in enumerate(model.decoder.layers):
            for owner, path in ((layer.self_attention, "self_attention"), (layer.mlp, "mlp")):
                for name in TARGETS:
                    if hasattr(owner, name):
                        m = getattr(owner, name)
                        m.parallel_mode = "row" if isinstance(m, stand_ins.TERowParallelLinear) else "column"
                        attrs = utils.get_adapter_attributes_from_linear(m)
                        adapter = utils.ParallelLinearAdapter(
                            attrs.in_features, attrs.out_features, dim,
                            base_linear_name=f"decoder.layers.{number}.{path}.{name}", activation="identity",
                            input_is_parallel=attrs.input_is_parallel, dropout=dropout, dropout_position="pre",
                            model_parallel_config=m.config, alpha=32, is_expert=False, a2a_experimental=False,
                            disable_tensor_parallel_comm=attrs.disable_tensor_parallel_comm,
                            disable_sequence_parallel_comm=attrs.disable_sequence_parallel_comm,
                            base_linear_is_parallel=attrs.base_linear_is_parallel,
                        )  # fmt: skip
                        setattr(owner, name, layers.LoRALinear(m, adapter))

    return adapt


def unswapped(self: torch.nn.Module) -> torch.nn.Module:
    """Module.bfloat16 of weights that have 16 bits already; fake ones cannot be swapped."""
    assert all(p.dtype is torch.bfloat16 for p in self.parameters())
    return self


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "dropout"), [(1, False, 0.1), (2, False, 0.0), (2, True, 0.0), (4, True, 0.1)]
)
def test_adapters_are_megatron_bridges(
    tp: int, sequence_parallel: bool, dropout: float, bridge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bridge is None:
        pytest.skip("megatron-bridge is not installed")
    monkeypatch.setattr(torch.nn.Module, "bfloat16", unswapped)
    how: Any = {"tp": tp, "batch": 2, "seq": 32, "sequence_parallel": sequence_parallel, "te": True}
    real: Ran = tuned_step(LLAMA, None, adapt=with_real_adapters(bridge, 8, dropout), **how)
    assert tuned_step(LLAMA, None, targets=TARGETS, rank=8, dropout=dropout, **how) == real
