"""Four processes over gloo, in worlds of two and four: real ranks send what the estimate says, call by call and byte for byte.

The tests of each engine have more setups, over fake groups of any size. Here what one rank sends another one receives."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed_oracle import OPTIONS
from real_ranks import COUNT, WORLDS, Sent, of_all_ranks

import memcalc
from memcalc.estimation.report import Report

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 501,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 301, "tie_word_embeddings": True,
}  # fmt: skip
KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 200_000, "max_reuse_distance": 150_000,
        "prefetch_bucket_size": 50_000}  # fmt: skip


class Case:
    """A setup twice: for an engine's oracle and for an estimate."""

    def __init__(self, config: dict[str, Any], engine: str, gpus: int, real: dict[str, Any], **options: Any) -> None:
        self.report: Report = memcalc.estimate(config, engine=engine, gpus=gpus, seq_len=8, **options)
        micro_batches = self.report.setup.micro_batches
        how = {"config": config, "gpus": gpus, "seq_len": 8, "micro_batch_size": 1, "micro_batches": micro_batches}
        self.oracle = engine, how | real


def cases() -> dict[str, Case]:
    out: dict[str, Case] = {}
    for n in WORLDS:
        all_of_it: dict[str, Any] = {"clip_grad_norm": True, "recompute": "full", "global_batch_size": 3 * n}
        real = {"clips": True, "recompute": "full"}
        out[f"ddp over {n}"] = Case(GPT2, "ddp", n, real | {"dtype": torch.float32}, precision="fp32", **all_of_it)
        for zero in (2, 3):
            reshards = {"mesh": (n,), "reshards": None if zero == 3 else False, "syncs": zero == 2}
            how = {**all_of_it, "zero": zero, "sync_each_micro_batch": zero == 2}
            out[f"fsdp2, zero {zero}, over {n}"] = Case(LLAMA, "fsdp2", n, real | reshards, **how)
        for zero in (0, 1, 2, 3):
            kept = KEPT if zero == 3 else {"reduce_bucket_size": 50_000} if zero else {}
            how = {OPTIONS[name]: size for name, size in kept.items()} | {"zero": zero, "precision": "fp32"}
            how |= {"steps": 3 if zero == 3 else 2}
            out[f"deepspeed, zero {zero}, over {n}"] = Case(
                GPT2, "deepspeed", n, how, zero=zero, precision="fp32", global_batch_size=2 * n, **kept
            )
        sync: dict[str, Any] = {"sync_each_micro_batch": True, "global_batch_size": 3 * n}
        out[f"ddp that reduces each, over {n}"] = Case(LLAMA, "ddp", n, {"syncs": True}, precision="bf16", **sync)
    mesh = {"mesh": (2, 2), "clips": True}
    out["fsdp2, hybrid"] = Case(LLAMA, "fsdp2", 4, mesh, zero=3, shard_group=2, clip_grad_norm=True)
    return out


def said(report: Report) -> Sent:
    out: Sent = {}
    for c in report.collectives:
        calls, payload = out.get(c.collective, (0, 0))
        out[c.collective] = calls + c.calls, payload + c.payload
    return out


def test_real_ranks_send_what_the_estimate_says() -> None:
    made = cases()
    found = of_all_ranks({name: case.oracle for name, case in made.items()})
    for name, case in made.items():
        for rank in range(COUNT):
            assert found[rank][name] == said(case.report), (name, rank)
