"""Megatron-Bridge's LoRA around GPTModel's layers: the adapters' shapes, bytes saved, peaks, and what is sent.

The real side is Megatron-Core's GPTModel with adapters of Megatron-Core's own layers (megatron_lora_stand_ins.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron_tuned_on_paper import tuned_on_paper, whole_on_paper
from megatron_tuned_oracle import TARGETS, tuned_step, whole_step

from memcalc.families.base.architecture import Architecture
from memcalc.megatron.layout import padded_vocab

LLAMA = Architecture(
    layers=3, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False,
)  # fmt: skip
MIXTURES = {
    "llama": LLAMA,
    "gpt": replace(
        LLAMA, gated=False, rms_norm=False, qkv_bias=True, linear_bias=True, kv_heads=8, head_dim=8, ffn=256
    ),
    "qk-norm": replace(LLAMA, qk_norm=True),
    "gpt-qk-norm": replace(LLAMA, gated=False, rms_norm=False, qkv_bias=True, linear_bias=True, qk_norm=True),
    "dropout": replace(LLAMA, hidden_dropout=0.1),
}
SOME_TARGETS = [("linear_qkv",), ("linear_proj",), ("linear_fc1", "linear_fc2"), TARGETS]
SPLITS = [(1, False), (2, False), (2, True), (4, True)]


def check(a: Architecture, *, recomputes: bool = False, **how: Any) -> None:
    how = {"batch": 2, "seq": 32, "rank": 8, **how}
    real = tuned_step(a, None, te=True, recomputes=recomputes, **how)
    ours = tuned_on_paper(a, None, recomputes=recomputes, **how)
    shard = how["batch"] * how["seq"] * a.hidden * 2 // (how["tp"] if how["sequence_parallel"] else 1)
    angles = how["seq"] * a.head_dim * 4  # which the real code caches
    given = 0 if how.get("received", True) or recomputes else shard  # an input that nothing saves is still its owner's
    assert (ours.trained, ours.frozen, ours.calls) == (real.trained, real.frozen, real.calls)
    assert ours.saved - angles + given == real.saved
    # with and without adapters a recomputed layer's output is there longer, and on paper gradients of dropout and of biases
    longer = (shard if a.hidden_dropout else 0) + (4 * a.ffn if a.linear_bias else 0)
    longer += 2 * shard * recomputes  # whose forward is a part of backward: see below
    assert -shard * recomputes <= ours.backward - angles + given - real.backward <= longer
    joined = how["batch"] * how["seq"] * (2 * a.heads + 2 * a.kv_heads) * a.head_dim * 2 // how["tp"]
    # on paper attention's output is there until the layer ends (test_any_architecture.py)
    assert -joined - shard <= ours.forward - angles + given - real.forward <= 2 * shard


@pytest.mark.parametrize(("tp", "sequence_parallel", "received"), [(1, False, False), (2, True, True)])
def test_adapters_of_a_layer(tp: int, sequence_parallel: bool, received: bool) -> None:
    check(LLAMA, tp=tp, sequence_parallel=sequence_parallel, targets=TARGETS, received=received)


@pytest.mark.slow
@pytest.mark.parametrize("received", [True, False], ids=["later", "first"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), SPLITS)
@pytest.mark.parametrize("targets", SOME_TARGETS, ids="+".join)
@pytest.mark.parametrize("name", MIXTURES)
def test_any_adapters(name: str, targets: tuple[str, ...], tp: int, sequence_parallel: bool, received: bool) -> None:
    check(MIXTURES[name], tp=tp, sequence_parallel=sequence_parallel, targets=targets, received=received)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 64])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("tp", "sequence_parallel"), SPLITS)
def test_ranks_and_dropout(tp: int, sequence_parallel: bool, dropout: float, rank: int) -> None:
    how: Any = {"tp": tp, "sequence_parallel": sequence_parallel, "dropout": dropout, "rank": rank}
    check(LLAMA, targets=TARGETS, **how)
    check(LLAMA, targets=TARGETS, batch=1, seq=16, **how)


@pytest.mark.slow
@pytest.mark.parametrize("received", [True, False], ids=["later", "first"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), SPLITS)
def test_recomputed_layers(tp: int, sequence_parallel: bool, received: bool) -> None:
    """Of the first stage Megatron-Bridge makes the layers' input want a gradient."""
    check(LLAMA, tp=tp, sequence_parallel=sequence_parallel, targets=TARGETS, received=received, recomputes=True)


@pytest.mark.parametrize(
    ("targets", "tp", "sequence_parallel"),
    [
        (TARGETS, 2, True),
        pytest.param(TARGETS, 2, False, marks=pytest.mark.slow),
        pytest.param(TARGETS, 1, False, marks=pytest.mark.slow),
        pytest.param(("linear_proj",), 2, True, marks=pytest.mark.slow),
        pytest.param(("linear_fc1",), 4, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt-qk-norm", marks=pytest.mark.slow)])
def test_adapters_of_a_whole_model(name: str, targets: tuple[str, ...], tp: int, sequence_parallel: bool) -> None:
    """With embedding, head and loss: what trains, what is sent, and products. The first layer's input wants no gradient."""
    a = MIXTURES[name]
    how: Any = {
        "tp": tp,
        "batch": 2,
        "seq": 32,
        "sequence_parallel": sequence_parallel,
        "vocab": padded_vocab(a.vocab, tp),
    }
    real, ours = whole_step(a, None, targets=targets, **how), whole_on_paper(a, None, targets=targets, **how)
    if tp == 1:  # the loss's three go over a group of one
        assert set(real.calls.values()) == {3}
        real.calls.clear()
    assert ours == real
