"""Layers of any mixture of options against Megatron-Core's GPTModel: parameters, bytes saved, and peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpt_on_paper import ran_on_paper
from megatron_layers_oracle import Ran, layers_step

from memcalc.families.base.architecture import Architecture
from memcalc.megatron.layout import Layout

GPT = Architecture(
    layers=3, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=256, vocab=128, gated=False, rms_norm=False, qkv_bias=True,
    linear_bias=True, qk_norm=False, positions=32, tied=True,
)  # fmt: skip
LLAMA = Architecture(
    layers=3, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False,
)  # fmt: skip
MIXTURES = {
    "gpt": GPT,
    "llama": LLAMA,
    "rms-gelu-biases-rope": replace(GPT, rms_norm=True, positions=None),
    "gpt-rope": replace(GPT, positions=None),
    "layernorm-swiglu": replace(LLAMA, rms_norm=False),
    "layernorm-gelu-gqa-rope": replace(GPT, kv_heads=2, positions=None),
    "gpt-gqa": replace(GPT, kv_heads=2),
    "gpt-mqa": replace(GPT, kv_heads=2, head_dim=16),
    "gpt-without-biases": replace(GPT, qkv_bias=False, linear_bias=False),
    "swiglu-with-biases": replace(LLAMA, qkv_bias=True, linear_bias=True),
    "layernorm-qk-norm-rope": replace(GPT, qk_norm=True, positions=None),
    "gpt-qk-norm": replace(GPT, qk_norm=True),
    "gpt-qk-norm-gqa": replace(GPT, qk_norm=True, kv_heads=4),
    "llama-qk-norm-qkv-bias": replace(LLAMA, qk_norm=True, qkv_bias=True),
    "squared-relu": replace(LLAMA, gated=False, squared_relu=True),
    "squared-relu-biases": replace(GPT, squared_relu=True),
    "llama-dropout": replace(LLAMA, hidden_dropout=0.1, attention_dropout=0.1),
    "gpt-dropout": replace(GPT, hidden_dropout=0.1, attention_dropout=0.1),
    "swiglu-biases-dropout": replace(LLAMA, linear_bias=True, qkv_bias=True, hidden_dropout=0.1),
}
BATCH, SEQ = 2, 32


def on_paper(a: Architecture, attention: str, tp: int) -> Ran:
    layout = Layout(tp, tp > 1, layers=a.layers, first=False, last=False, fuses_accumulation=False, mask_in_batch=False)
    return ran_on_paper(a, layout, BATCH, SEQ, attention)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MIXTURES)
def test_layers_are_gpt_models(name: str, attention: str, tp: int) -> None:
    a = MIXTURES[name]
    real = layers_step(a, attention=attention, tp=tp, batch=BATCH, seq=SEQ)
    ours = on_paper(a, attention, tp)
    angles = SEQ * a.head_dim * 4 if a.positions is None else 0  # which the real code caches
    assert ours.parameters == real.parameters
    assert ours.saved - angles == real.saved
    # a shard of the gradient, and gradients of biases, are there a little longer on paper
    shard = BATCH * SEQ // tp * a.hidden * 2
    longer = (2 * 2 * a.ffn if a.linear_bias else 0) + (shard if tp > 1 and a.hidden_dropout else 0)
    assert 0 <= ours.backward - angles - real.backward <= longer
    # on paper a layer has its attention's output until its end, as measured runs do; in this version of Megatron-Core the joined
    # queries, keys and values, and the queries' copy, are there until attention ends
    joined = BATCH * SEQ * (2 * a.heads + 2 * a.kv_heads) * a.head_dim * 2 // tp
    assert -joined <= ours.forward - angles - real.forward <= shard
