"""A layer whose experts are frozen, against Megatron-Core's MoELayer with functions in the place of Transformer Engine's
kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megatron_moe_oracle
import pytest
import torch
from megatron_moe_paper import paper_layer

from memcalc.families.base.architecture import Architecture, Experts
from memcalc.families.base.module import Run, Weight

MIXTRAL = Architecture(
    layers=1, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False, experts=Experts(count=4, per_token=2, ffn=48),
)  # fmt: skip
assert MIXTRAL.experts is not None
SHARED = replace(MIXTRAL, experts=replace(MIXTRAL.experts, shared_ffn=32))


class FrozenProduct(torch.autograd.Function):
    """GroupedLinear over frozen weights (transformer_engine/pytorch/module/grouped_linear.py): it saves no input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights)
        ctx.like = x.shape
        return torch.empty((x.shape[0], width), dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weights = ctx.saved_tensors
        return torch.empty(ctx.like, dtype=grad.dtype), None, *(None for _ in weights)


class FrozenGroupedLinear(megatron_moe_oracle._GroupedLinear):
    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, _: Any) -> Any:
        return FrozenProduct.apply(x, self.width, *self.parameters()), None


@pytest.mark.parametrize(
    ("a", "tp", "ep", "etp"),
    [
        (MIXTRAL, 1, 2, 1),
        pytest.param(SHARED, 1, 1, 1, marks=pytest.mark.slow),
        pytest.param(MIXTRAL, 2, 2, 1, marks=pytest.mark.slow),
        pytest.param(SHARED, 2, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_frozen_experts(a: Architecture, tp: int, ep: int, etp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    how: Any = {"tp": tp, "ep": ep, "etp": etp, "batch": 2, "seq": 16}
    whole = paper_layer(a, **how)
    add = Run.add_weight

    def add_weight(run: Run, weight: Weight) -> None:
        add(run, weight, wants_gradient=weight.component != "experts")

    monkeypatch.setattr(Run, "add_weight", add_weight)
    monkeypatch.setattr(megatron_moe_oracle, "_GroupedLinear", FrozenGroupedLinear)
    real = megatron_moe_oracle.moe_layer.__wrapped__(a, **how)
    ours = paper_layer(a, **how)
    # the real code's buffer for gathered inputs, which is there from the first step on (test_moe.py)
    gathered = 2 * 16 * a.hidden * 2 * tp if tp > 1 and a is SHARED else 0
    assert (ours.saved, ours.backward, ours.calls) == (real.saved - gathered, real.backward - gathered, real.calls)
    assert ours.saved < whole.saved
