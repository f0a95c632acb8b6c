"""A routed layer against Megatron-Core's MoELayer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_moe_oracle import moe_layer
from megatron_moe_paper import paper_layer

from memcalc.families.base.architecture import Architecture, Experts

MIXTRAL = Architecture(
    layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=300, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False, experts=Experts(count=8, per_token=2, ffn=32),
)  # fmt: skip
SHARED = replace(
    MIXTRAL, experts=Experts(count=4, per_token=3, ffn=48, shared_ffn=32, shared_gate=True, normalised=False)
)
GELU = replace(MIXTRAL, gated=False, rms_norm=False)
GELU_SHARED = replace(GELU, experts=Experts(count=4, per_token=3, ffn=48, shared_ffn=32))
BATCH, SEQ = 2, 32


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("a", [MIXTRAL, SHARED, GELU, GELU_SHARED], ids=["mixtral", "shared", "gelu", "gelu-shared"])
def test_a_layer_is_megatrons(a: Architecture, tp: int, ep: int, etp: int) -> None:
    experts = a.experts
    assert experts is not None
    real = moe_layer(a, tp=tp, ep=ep, etp=etp, batch=BATCH, seq=SEQ)
    ours = paper_layer(a, tp=tp, ep=ep, etp=etp, batch=BATCH, seq=SEQ)
    assert ours.calls == real.calls
    # rows of their own in an estimate: the all-gather buffer of the shared experts' input, and the dispatcher's map of
    # tokens to experts with its weights, which the layer's forward has besides some numbers of tokens
    gathered = tp * BATCH * SEQ * a.hidden * 2 if tp > 1 and experts.shared_ffn else 0
    dispatcher = BATCH * SEQ * experts.count * (2 + 1)
    assert (ours.saved, ours.backward) == (real.saved - gathered, real.backward - gathered)
    counted = real.forward - gathered - ours.forward - dispatcher
    assert 0 <= counted <= 8 * (experts.count * (2 + 2 * ep * etp) + 4 * ep * etp)


def test_parameters_are_megatrons() -> None:
    real = moe_layer(SHARED, tp=2, ep=2, etp=2, batch=BATCH, seq=SEQ).parameters
    assert {name: shape for name, shape in real.items() if "experts.linear" not in name or "shared" in name} == {
        "router.weight": (4, 64),
        "shared_experts.gate_weight": (1, 64),
        "shared_experts.linear_fc1.weight": (32, 64),
        "shared_experts.linear_fc2.weight": (64, 16),
    }
    ours = paper_layer(SHARED, tp=2, ep=2, etp=2, batch=BATCH, seq=SEQ).parameters
    assert ours.pop("experts.linear_fc1.weight") == (2, *real["experts.linear_fc1.weight1"])
    assert ours.pop("experts.linear_fc2.weight") == (2, *real["experts.linear_fc2.weight1"])
    assert ours.items() <= real.items()
    assert len(real) - len(ours) == 4
