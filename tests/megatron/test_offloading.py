"""Fine-grained offloading of activations against Megatron-Core's own manager: bytes saved and peaks."""

from __future__ import annotations

from typing import Any

import pytest
from fine_grained_oracle import offloading_step
from gpt_on_paper import ran_on_paper
from megatron_layers_oracle import Ran

from memcalc.families.base.architecture import Architecture, Latent
from memcalc.megatron import gpt_model
from memcalc.megatron.layout import Layout
from memcalc.megatron.offloading import Chunk

MLA = Architecture(
    layers=4, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False,
    latent=Latent(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=12),
)  # fmt: skip
BATCH, SEQ, LEAST = 2, 32, 1000
SETS = [
    ("attn_norm",), ("qkv_linear",), ("core_attn",), ("core_attn", "attn_proj"),
    ("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
]  # fmt: skip


RECOMPUTED = [(), ("layernorm",), ("mla_up_proj", "mlp"), ("layernorm", "mla_up_proj", "mlp")]
ALONE = ("qkv_linear",), "mla_up_proj"
"""What Megatron-Core 0.16.1 fails with: the recomputation asks for what is moved before a group has said which chunk runs."""
CASES = [(o, r) for o in SETS for r in RECOMPUTED if not (o == ALONE[0] and ALONE[1] in r)]


def _marked(case: tuple[tuple[str, ...], tuple[str, ...]]) -> Any:
    few = case in (CASES[0], CASES[-1])
    return pytest.param(*case, id="-".join(map("+".join, case)), marks=() if few else pytest.mark.slow)


each = pytest.mark.parametrize(("offloaded", "recomputed"), map(_marked, CASES))


def on_paper(offloaded: tuple[str, ...], recomputed: tuple[str, ...]) -> Ran:
    layout = Layout(
        layers=MLA.layers, first=False, last=False, fuses_accumulation=False, mask_in_batch=False, recomputed=recomputed,
        offloaded=offloaded, least_offloaded=LEAST,
    )  # fmt: skip
    return ran_on_paper(MLA, layout, BATCH, SEQ)


@each
def test_a_chunk_whose_backward_follows(
    offloaded: tuple[str, ...], recomputed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (real,) = offloading_step(MLA, recomputed, offloaded, batch=BATCH, seq=SEQ, least=LEAST, many=1)
    monkeypatch.setattr(gpt_model, "Chunk", lambda *args, follows, **how: Chunk(*args, follows=True, **how))
    ours = on_paper(offloaded, recomputed)
    assert (ours.saved, ours.backward) == (real.saved, real.backward)
    # on paper a layer has its attention's output until its end
    assert 0 <= ours.forward - real.forward <= BATCH * SEQ * MLA.hidden * 2


@each
def test_a_chunk_after_others(offloaded: tuple[str, ...], recomputed: tuple[str, ...]) -> None:
    real = offloading_step(MLA, recomputed, offloaded, batch=BATCH, seq=SEQ, least=LEAST, many=2)[1]
    ours = on_paper(offloaded, recomputed)
    assert (ours.saved, ours.backward) == (real.saved, real.backward)
    assert 0 <= ours.forward - real.forward <= BATCH * SEQ * MLA.hidden * 2
