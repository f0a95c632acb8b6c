"""Engines that go over transformers' modules, of a model whose loss is also that of its routers' balance."""

from __future__ import annotations

from typing import Any

import pytest
from ddp_oracle import replicated_step
from deepspeed_oracle import deepspeed_step
from fsdp2_oracle import sharded_step
from steps_compared import check_step, flops_of

import memcalc

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301, "num_local_experts": 8, "output_router_logits": True,
}  # fmt: skip
"""Deep enough that the estimate is of a run of fewer layers."""
PHASES = ("forward", "backward", "step")


@pytest.mark.parametrize(
    ("options", "real"),
    [
        ({}, {}),
        ({"recompute": "full"}, {"recompute": True}),
        ({"zero": 2, "seq_len": 4}, {"reshards": False, "seq_len": 4}),
        ({"gpus": 8, "ep": 4, "recompute": "full"}, {"mesh": (8,), "expert_parallel": 4, "recompute": True}),
        ({"gpus": 4, "tp": 2}, {"mesh": (2,), "tensor_parallel": 2}),
    ],
    ids=["zero 3", "recompute", "zero 2, few tokens", "ep", "tp"],
)
def test_fsdp2(options: dict[str, Any], real: dict[str, Any]) -> None:
    how = {"mesh": (4,), "micro_batch_size": 2, "seq_len": 32, "implementation": "fused"} | real
    theirs = sharded_step(dict(MIXTRAL), **how)
    setup: dict[str, Any] = {"gpus": 4, "zero": 3, "engine": "fsdp2", "optimizer_implementation": "fused"}
    workload = {name: how[name] for name in ("micro_batch_size", "seq_len")}
    check_step(memcalc.estimate(dict(MIXTRAL), **setup | workload | options), theirs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_deepspeed(zero: int, recompute: bool) -> None:
    steps = 3 if zero == 3 else 2
    real = deepspeed_step(MIXTRAL, steps=steps, gpus=2, zero=zero, seq_len=32, recompute=recompute)
    report = memcalc.estimate(
        dict(MIXTRAL),
        engine="deepspeed",
        gpus=2,
        zero=zero,
        seq_len=32,
        recompute="full" if recompute else "none",
    )
    assert [report.phases[phase] for phase in PHASES] == [getattr(real, phase) for phase in PHASES]
    assert flops_of(report) == real.flops


@pytest.mark.parametrize("seq_len", [4, 64])
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"zero": 2}], ids=str)
def test_a_deep_stack_under_fsdp2_is_that_of_a_run_of_fewer_layers(options: dict[str, Any], seq_len: int) -> None:
    """Gathers and reductions reach into neighbours, and backward goes through the stack twice."""
    setup: dict[str, Any] = {"gpus": 4, "engine": "fsdp2", "zero": 3, "seq_len": seq_len} | options
    fields = MIXTRAL | {"num_hidden_layers": 20, "num_local_experts": 64, "vocab_size": 31}
    shallow, whole = memcalc.load_model(fields), memcalc.load_model(fields)
    whole.program.pattern = lambda: None  # type: ignore[method-assign]
    assert memcalc.estimate(shallow, **setup).phases == memcalc.estimate(whole, **setup).phases


NO_SHARED: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 301, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24, "first_k_dense_replace": 1, "n_shared_experts": 0,
}  # fmt: skip
"""Its shared experts are linear layers of no width."""


@pytest.mark.parametrize("zero", [0, 2])
def test_weights_without_elements_under_deepspeed(zero: int) -> None:
    ranks = [deepspeed_step(NO_SHARED, steps=2, gpus=2, zero=zero, seq_len=32, rank=rank) for rank in (0, 1)]
    report = memcalc.estimate(dict(NO_SHARED), engine="deepspeed", gpus=2, zero=zero, seq_len=32)
    assert [report.phases[phase] for phase in PHASES] == [max(getattr(r, phase) for r in ranks) for phase in PHASES]


def test_engines_that_fail_over_weights_without_elements() -> None:
    with pytest.raises(RuntimeError, match="expects non-empty tensor"):
        sharded_step(dict(NO_SHARED), mesh=(4,), micro_batch_size=1, seq_len=16, implementation="fused")
    with pytest.raises(memcalc.InputError, match=r"--engine fsdp2: .*weights of no elements.*shared_experts.*allowed"):
        memcalc.estimate(dict(NO_SHARED), engine="fsdp2", gpus=4, zero=3, seq_len=16)
    with pytest.raises(AssertionError, match="NOT_AVAILABLE"):
        deepspeed_step(NO_SHARED, steps=3, gpus=2, zero=3, seq_len=16)
    with pytest.raises(memcalc.InputError, match=r"--zero 3: .*weights of no elements.*allowed: 0, 1, 2"):
        memcalc.estimate(dict(NO_SHARED), engine="deepspeed", gpus=2, zero=3, seq_len=16)


def test_weights_without_elements_under_ddp() -> None:
    setup: dict[str, Any] = {"engine": "ddp", "gpus": 2, "precision": "bf16", "optimizer_implementation": "fused"}
    report = memcalc.estimate(dict(NO_SHARED), seq_len=16, **setup)
    real = replicated_step(dict(NO_SHARED), gpus=2, seq_len=16)
    assert [report.phases[phase] for phase in PHASES] == [getattr(real, phase) for phase in PHASES]
