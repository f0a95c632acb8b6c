"""A whole step of torch's own DDP: every collective call by call, and the peak of every phase to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_oracle import Replicated, replicated_step

import memcalc
from memcalc.estimation.report import Report

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 700,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 500,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 501,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
WIDE = {**QWEN3, "vocab_size": 9000, "hidden_size": 256}
"""Of several buckets."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "bf16-autocast": torch.float32}


def ours(config: Any, gpus: int, precision: str, **how: Any) -> Report:
    batch = how.get("micro_batch_size", 1)
    return memcalc.estimate(
        config, engine="ddp", gpus=gpus, precision=precision, micro_batch_size=batch, seq_len=how.get("seq_len", 16),
        global_batch_size=gpus * batch * how.get("micro_batches", 1), recompute=how.get("recompute") or "none",
        clip_grad_norm=how.get("clips", False), optimizer_implementation=how.get("implementation", "fused"),
        sync_each_micro_batch=how.get("syncs"),
    )  # fmt: skip


def real(config: dict[str, Any], gpus: int, precision: str, **how: Any) -> Replicated:
    autocast = torch.bfloat16 if precision == "bf16-autocast" else None
    return replicated_step(config, gpus=gpus, dtype=DTYPES[precision], autocast=autocast, **how)


def said(report: Report) -> dict[tuple[str, str], tuple[int, int]]:
    return {(c.phase, c.collective): (c.calls, c.payload) for c in report.collectives}


def counted(step: Replicated) -> dict[tuple[str, str], tuple[int, int]]:
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for phase, kind, size in step.sent:
        calls, payload = out.get((phase, kind), (0, 0))
        out[phase, kind] = calls + 1, payload + size
    return out


def check(config: dict[str, Any], gpus: int = 4, precision: str = "bf16", **how: Any) -> tuple[Report, Replicated]:
    report, step = ours(config, gpus, precision, **how), real(config, gpus, precision, **how)
    assert said(report) == counted(step)
    of_cpu = 0 if how.get("implementation", "fused") == "fused" else 4 * len(report.model.weights())
    phases = {"forward": step.forward, "backward": step.backward, "step": step.step}
    assert report.phases == {phase: size - of_cpu for phase, size in phases.items()}
    return report, step


@pytest.mark.parametrize(
    ("config", "recompute"),
    [(LLAMA, ""), (LLAMA, "full"), (LLAMA, "op"), (QWEN3, "full"), (GPT2, ""), (GPT2, "op"), (WIDE, "full")],
)
def test_a_step(config: dict[str, Any], recompute: str) -> None:
    check(config, recompute=recompute, micro_batch_size=2)


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", ""), ("bf16", "full"), ("bf16-autocast", "op")])
def test_gradients_that_wait_under_no_sync(precision: str, recompute: str) -> None:
    """Buffers are broadcast where gradients are all-reduced: once a step, with the last micro-batch."""
    report, _ = check(LLAMA, gpus=8, precision=precision, recompute=recompute, micro_batches=3)
    assert report.collectives == ours(LLAMA, 8, precision, recompute=recompute).collectives


@pytest.mark.parametrize(
    ("config", "precision", "recompute"),
    [(LLAMA, "fp32", ""), (GPT2, "bf16", "full"), (QWEN3, "bf16-autocast", "op"), (WIDE, "bf16", "")],
)
def test_gradients_that_are_reduced_with_each_micro_batch(config: Any, precision: str, recompute: str) -> None:
    """Gradients are whole either way: what it costs is communication."""
    how: dict[str, Any] = {"precision": precision, "recompute": recompute, "micro_batches": 3}
    report, _ = check(config, gpus=8, syncs=True, **how)
    waits = ours(config, 8, **how)
    assert report.phases == waits.phases
    assert {at: (3 * calls, 3 * size) for at, (calls, size) in said(waits).items()} == said(report)


@pytest.mark.parametrize(("implementation", "precision"), [("fused", "bf16"), ("fused", "fp32"), ("for-loop", "bf16")])
def test_clipping_moves_nothing(implementation: str, precision: str) -> None:
    """Gradients are whole on every rank. Its norms set the step's peak where the optimizer has no temporaries."""
    clipped, _ = check(QWEN3, 64, precision, clips=True, implementation=implementation)
    model: Any = clipped.model  # one model answers for both, whichever is asked first
    plain = ours(model, 64, precision, implementation=implementation)
    assert clipped.collectives == plain.collectives
    tensors, itemsize = len(clipped.model.weights()), 4 if precision == "fp32" else 2
    more = (2 * tensors + 1) * itemsize if implementation == "fused" else 0
    assert clipped.phases["step"] - plain.phases["step"] == more


@pytest.mark.parametrize("precision", ["bf16-autocast", "fp32"])
def test_all_of_it(precision: str) -> None:
    how: dict[str, Any] = {"recompute": "full", "micro_batches": 2, "clips": True, "micro_batch_size": 2, "seq_len": 33}
    check(WIDE, gpus=3, precision=precision, **how)
