"""Adam-mini of the adam-mini package itself: its states, and the transient peak of its step, over transformers' models."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from oracle import LiveBytes, build

import memcalc
from memcalc.core.dims import numel
from memcalc.core.dtypes import bf16, fp32
from memcalc.core.tensor import Memory
from memcalc.engines.base.holdings import met_in_step, parameter_classes
from memcalc.optimizers import load_optimizer

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "head_dim": 16,
}  # fmt: skip
MODELS: list[dict[str, Any]] = [
    LLAMA,
    {**LLAMA, "tie_word_embeddings": True, "vocab_size": 77, "num_key_value_heads": 4},
    {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 2},
    {**LLAMA, "model_type": "qwen3", "head_dim": 32},
]  # fmt: skip
DTYPES = {fp32: torch.float32, bf16: torch.bfloat16}


def real(config: dict[str, Any], dtype: torch.dtype) -> tuple[Counter[Any], int]:
    """The states, and the most bytes of a second step beside them."""
    package = pytest.importorskip("adam_mini")
    model = build(config, "sdpa", dtype)
    optimizer = package.Adam_mini(
        model.named_parameters(), dim=config["hidden_size"], n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads"), verbose=False,
    )  # fmt: skip
    peak = 0
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        with LiveBytes() as mode:
            for parameter in [*model.parameters(), *(p.grad for p in model.parameters())]:
                mode.register(parameter)
            for state in optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor):
                        mode.register(tensor)
            before = mode.now
            mode.highest = before
            optimizer.step()
            peak = mode.highest - before
    kept: Counter[Any] = Counter()
    for state in optimizer.state.values():
        kept.update((name, t.numel(), t.element_size()) for name, t in state.items() if isinstance(t, torch.Tensor))
    return kept, peak


def ours(config: dict[str, Any], dtype: Any) -> tuple[Counter[Any], int]:
    report = memcalc.estimate(config, optimizer="adam-mini", precision=dtype.name, seq_len=16)
    optimizer, memory = load_optimizer("adam-mini"), Memory()
    states = optimizer.states(parameter_classes(report.model), dtype, "for-loop")
    kept: Counter[Any] = Counter()
    for one in states:
        kept[one.name, numel(one.shape)[0], one.dtype.itemsize] += one.count
    optimizer.step(memory, met_in_step(report.model, report.setup), dtype, dtype, "for-loop")
    live = most = 0
    for event in memory.log:
        row = memory.rows[event if event >= 0 else ~event]
        live += (1 if event >= 0 else -1) * numel(row.shape)[0] * row.dtype.itemsize
        most = max(most, live)
    return kept, most


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["model_type"])
def test_states_and_step(config: dict[str, Any], dtype: Any) -> None:
    assert ours(config, dtype) == real(config, DTYPES[dtype])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLAMA, {"gpus": 2}, "--optimizer adam-mini: with engine ddp"),
        (LLAMA, {"gpus": 2, "engine": "fsdp2"}, "--optimizer adam-mini: over fsdp2's shards"),
        (LLAMA, {"gpus": 2, "zero": 1}, "--optimizer adam-mini: "),
        ({**LLAMA, "num_attention_heads": 3, "hidden_size": 60, "head_dim": 16, "num_key_value_heads": 3}, {},
         "--optimizer adam-mini: does not find whole heads"),
        ("pythia-1b", {}, "--optimizer adam-mini: takes gpt_neox.final_layer_norm.weight for a matrix"),
        ("bert-base-uncased", {}, "--optimizer adam-mini: takes bert.embeddings.LayerNorm.weight for a matrix"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_what_is_refused(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"^{message}"):
        memcalc.estimate(config, optimizer="adam-mini", seq_len=16, **options)


def test_what_is_refused_fails() -> None:
    """A norm's weight of a BERT is taken for a matrix."""
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 90,
              "intermediate_size": 64}  # fmt: skip
    with pytest.raises((IndexError, RuntimeError)):
        real(config, torch.float32)
    with pytest.raises(memcalc.InputError, match=r"^--optimizer adam-mini: takes "):
        memcalc.estimate(config, optimizer="adam-mini", seq_len=16)
