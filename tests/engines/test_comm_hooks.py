"""DDP's communication hooks against torch's own: calls and bytes of every all-reduce, what the state keeps, and peaks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from crossed import crossed
from engines.comm_hook_oracle import Hooked, hooked_step

import memcalc
from memcalc.estimation.report import Report

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 700,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 501,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
WIDE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 9, "vocab_size": 9000,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
"""Of several buckets, in fp32."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def both(config: dict[str, Any], hook: str, precision: str = "fp32", **how: Any) -> tuple[Report, Hooked]:
    real = hooked_step(config, hook, dtype=DTYPES[precision], **how)
    batch = how.get("micro_batch_size", 1)
    report = memcalc.estimate(
        config, engine="ddp", gpus=4, precision=precision, comm_hook=hook, seq_len=how.get("seq_len", 16),
        powersgd_rank=how.get("rank", 1) if "powersgd" in hook else None, micro_batch_size=batch,
        global_batch_size=4 * batch * how.get("micro_batches", 1), optimizer_implementation="fused",
        compression_phase=None if how.get("compressed", True) else "warmup", recompute=how.get("recompute") or "none",
    )  # fmt: skip
    return report, real


def check(config: dict[str, Any], hook: str, precision: str = "fp32", **how: Any) -> tuple[Report, Hooked]:
    report, real = both(config, hook, precision, **how)
    sent: Counter[tuple[str, int]] = Counter()
    for name, elements in real.sent:
        dtype = NAMES[name]
        sent[dtype, 0] += 1
        sent[dtype, 1] += elements * (4 if dtype == "fp32" else 2)
    own = [c for c in report.collectives if c.collective == "all_reduce"]
    assert {c.dtype for c in own} == {dtype for dtype, _ in sent}
    assert sum(c.calls for c in own) == sum(n for (_, i), n in sent.items() if i == 0)
    assert sum(c.payload for c in own) == sum(n for (_, i), n in sent.items() if i == 1)
    assert sum(c.wire for c in own) == sum(2 * 3 * c.payload // 4 for c in own)
    assert held(report, "DDP buckets") == real.buckets
    assert held(report, "PowerSGD's errors") == real.kept["error_dict"]
    assert held(report, "PowerSGD's P") == real.kept["p_memory_dict"]
    assert held(report, "PowerSGD's Q") == real.kept["q_memory_dict"]
    assert report.phases == {"forward": real.forward, "backward": real.backward, "step": real.step}
    return report, real


def held(report: Report, name: str) -> int:
    return sum(item.nbytes for item in report.items if item.name.startswith(name))


MODELS = {"llama": LLAMA, "gpt2": GPT2, "wide": WIDE}


@pytest.mark.parametrize(("name", "hook"), crossed([*MODELS], ["fp16", "bf16", "powersgd", "batched-powersgd"]))
def test_a_step(name: str, hook: str) -> None:
    report, real = check(MODELS[name], hook)
    if name == "wide":
        assert len(real.sent) > 1
    parts = sum(item.at_peak for item in report.items)
    assert parts == report.peak


@pytest.mark.parametrize(("precision", "hook"), crossed(["bf16", "fp16"], ["fp16", "bf16", "powersgd"]))
def test_gradients_of_sixteen_bits(precision: str, hook: str) -> None:
    """A bucket that has the hook's dtype is sent itself."""
    check(LLAMA, hook, precision)


@pytest.mark.parametrize(("rank", "hook"), crossed([2, 3, 8, 32, 1000], ["powersgd", "batched-powersgd"]))
def test_ranks(rank: int, hook: str) -> None:
    if hook == "batched-powersgd" and rank == 1000:
        return  # a square of fewer rows, which torch.linalg.qr cannot write to
    check(GPT2, hook, rank=rank)


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_of_several_micro_batches(hook: str) -> None:
    check(LLAMA, hook, micro_batches=3)


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "recompute"), crossed(["bf16", "powersgd"], ["none", "full"]))
def test_long_sequences(hook: str, recompute: str) -> None:
    """Activations set the peak: it is at no bucket's end, or at one in the middle."""
    how = {} if recompute == "none" else {"recompute": recompute}
    check(WIDE, hook, seq_len=65, micro_batch_size=3, **how)


@pytest.mark.parametrize("hook", ["powersgd", "batched-powersgd"])
def test_warmup_is_plain_ddp(hook: str) -> None:
    report, _ = check(LLAMA, hook, compressed=False)
    plain = memcalc.estimate(
        LLAMA, engine="ddp", gpus=4, precision="fp32", seq_len=16, optimizer_implementation="fused"
    )
    assert report.phases == plain.phases
    assert report.collectives == plain.collectives
    assert report.device == plain.device
