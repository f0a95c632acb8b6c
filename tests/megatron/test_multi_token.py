"""Multi-token prediction on the last stage against Megatron-Core's own: parameters, bytes saved, and peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpt_on_paper import ran_on_paper
from megatron_layers_oracle import Ran
from megatron_mtp_oracle import predicting_step

from memcalc.families.base.architecture import Architecture
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layout import Layout

LLAMA = Architecture(
    layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=512, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False, mtp=1,
)  # fmt: skip
GPT = replace(LLAMA, gated=False, rms_norm=False, qkv_bias=True, linear_bias=True, positions=32, kv_heads=8, head_dim=8)
MODELS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied=True),
    "two-more-tokens": replace(LLAMA, mtp=2),
    "gpt": GPT,
    "gpt-tied-three-more-tokens": replace(GPT, tied=True, mtp=3),
    "wide": replace(LLAMA, vocab=768, hidden=96, mtp=2),
}
DEFAULT = ("two-more-tokens", "gpt-tied-three-more-tokens")
BATCH, SEQ = 2, 32


def on_paper(a: Architecture, tp: int, first: bool) -> Ran:
    layout = Layout(
        tp, tp > 1, layers=a.layers, first=first, last=True, ends=True, fuses_accumulation=False, mask_in_batch=False
    )
    return ran_on_paper(a, layout, BATCH, SEQ)


@pytest.mark.parametrize("first", [False, True], ids=["last-stage", "one-stage"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_the_last_stage_is_gpt_models(name: str, tp: int, first: bool) -> None:
    a = MODELS[name]
    real, ours = predicting_step(a, tp=tp, batch=BATCH, seq=SEQ, first=first), on_paper(a, tp, first)
    angles = SEQ * a.head_dim * 4 if a.positions is None else 0  # which the real code caches
    token = BATCH * SEQ * 4  # a number for each token
    assert list(ours.parameters.items()) == list(real.parameters.items())
    assert ours.saved - angles == real.saved - 4 * a.mtp  # the number of tokens of each loss
    # later versions have these losses in a function of their own (process_mtp_loss): its last logits are gone when it returns
    logits = BATCH * SEQ * a.vocab // tp * 2
    assert 0 <= real.forward - logits - (ours.forward - angles) <= 4 * token
    assert abs(ours.backward - angles - real.backward) <= token


def test_a_stage_of_its_own_has_no_norm_of_the_decoder() -> None:
    """That norm is in the stage with the decoder's last layer (has_final_layernorm_in_this_stage)."""
    last = GPTModel(LLAMA, Layout(layers=0, first=False, last=True, ends=False))
    before = GPTModel(LLAMA, Layout(layers=2, first=True, last=False, ends=True))
    assert "decoder.final_layernorm.weight" not in {w.name for w in last.weights()}
    assert "decoder.final_layernorm.weight" in {w.name for w in before.weights()}
    assert "mtp.layers.0.eh_proj.weight" not in {w.name for w in before.weights()}
