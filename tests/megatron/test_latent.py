"""Latent attention against Megatron-Core's own: parameters, bytes saved, and peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpt_on_paper import ran_on_paper
from megatron_latent_oracle import latent_step
from megatron_layers_oracle import Ran

from memcalc.families.base.architecture import Architecture, Latent
from memcalc.megatron.layout import Layout

LATENT = Latent(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=12)
LLAMA = Architecture(
    layers=2, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False, latent=LATENT,
)  # fmt: skip
GPT = replace(LLAMA, gated=False, rms_norm=False, linear_bias=True, positions=32, hidden_dropout=0.1)
MODELS = {
    "llama": LLAMA,
    "llama-whole-queries": replace(LLAMA, latent=replace(LATENT, q_rank=None)),
    "llama-without-norms": replace(LLAMA, latent=replace(LATENT, normed=False)),
    "whole-queries-without-norms": replace(LLAMA, latent=replace(LATENT, q_rank=None, normed=False)),
    "gpt": GPT,
    "gpt-without-norms": replace(GPT, latent=replace(LATENT, normed=False)),
}
BATCH, SEQ = 2, 32


def on_paper(a: Architecture) -> Ran:
    layout = Layout(layers=a.layers, first=False, last=False, fuses_accumulation=False, mask_in_batch=False)
    return ran_on_paper(a, layout, BATCH, SEQ)


@pytest.mark.parametrize(
    "name", [n if n.startswith("gpt") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_layers_are_gpt_models(name: str) -> None:
    a = MODELS[name]
    real, ours = latent_step(a, batch=BATCH, seq=SEQ), on_paper(a)
    assert ours.parameters == real.parameters
    assert (ours.saved, ours.backward) == (real.saved, real.backward)
    # on paper a layer has its attention's output until its end
    assert ours.forward - real.forward == BATCH * SEQ * a.hidden * 2
