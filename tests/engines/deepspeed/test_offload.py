"""DeepSpeed 0.19.8 itself with its optimizer on the host: bytes of the GPU, bytes of the host, collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from deepspeed_cases import GPT2 as LARGE_GPT2
from deepspeed_cases import LLAMA as LARGE_LLAMA
from deepspeed_cases import rank_played
from deepspeed_oracle import OPTIONS, PRECISIONS, SIZES
from offload_oracle import Offloaded, most_reserved, offloaded_step

import memcalc
from memcalc.device.allocator import CachingAllocator
from memcalc.device.replay import replayed
from memcalc.device.shown import Workspaces
from memcalc.offload.host import totals

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "head_dim": 16}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 701}
TIED_GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 501,
             "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip

CASES: list[tuple[Any, dict[str, Any]]] = [
    (LLAMA, {"zero": 1, "gpus": 2, "reduce_bucket_size": 40_000}),
    (LLAMA, {"zero": 1, "gpus": 3, "reduce_bucket_size": 15_000, "precision": "fp16", "clipping": 1.0}),
    (LLAMA, {"zero": 1, "gpus": 2, "reduce_bucket_size": 15_000, "micro_batches": 2}),
    (TIED_GPT2, {"zero": 1, "gpus": 1, "reduce_bucket_size": 10**6, "precision": "fp32"}),
    (LLAMA, {"zero": 2, "gpus": 2, "reduce_bucket_size": 40_000, "recompute": True}),
    (LLAMA, {"zero": 2, "gpus": 3, "reduce_bucket_size": 15_000, "precision": "fp16", "clipping": 1.0}),
    (LLAMA, {"zero": 2, "gpus": 2, "reduce_bucket_size": 15_000, "micro_batches": 3}),
    (TIED, {"zero": 2, "gpus": 2, "reduce_bucket_size": 20_000, "precision": "fp32", "micro_batches": 2}),
    (TIED_GPT2, {"zero": 2, "gpus": 1, "reduce_bucket_size": 10**6}),
    (LLAMA, {"zero": 2, "gpus": 2, "reduce_bucket_size": 40_000, "frozen": ("model.embed_tokens", "model.layers.0.")}),
    (LLAMA, {"zero": 1, "gpus": 2, "reduce_bucket_size": 40_000, "frozen": ("model.embed_tokens",)}),
    (LLAMA, {"zero": 3, "gpus": 2, "reduce_bucket_size": 40_000}),
    (
        TIED,
        {
            "zero": 3,
            "gpus": 2,
            "reduce_bucket_size": 20_000,
            "precision": "fp32",
            "micro_batches": 2,
            "recompute": True,
        },
    ),
    (TIED_GPT2, {"zero": 3, "gpus": 1, "reduce_bucket_size": 10**6}),
    (LLAMA, {"zero": 3, "gpus": 2, "reduce_bucket_size": 40_000, "param_persistence_threshold": 0}),
    (LLAMA, {"zero": 3, "gpus": 2, "reduce_bucket_size": 40_000, "frozen": ("model.embed_tokens", "model.layers.0.")}),
]
each = pytest.mark.parametrize(("config", "how"), CASES, ids=str)
FREEZE = {("model.embed_tokens", "model.layers.0."): "embeddings,first:1", ("model.embed_tokens",): "embeddings"}


def real(config: Any, how: dict[str, Any]) -> list[Offloaded]:
    """A steady step of every rank, or of ZeRO-3's first one, which is steady in its third step: its ranks are alike."""
    named = {OPTIONS.get(name, name): value for name, value in how.items()}
    steps = {"steps": 3} if how["zero"] == 3 else {}
    ranks = range(1 if how["zero"] == 3 else how["gpus"])
    return [offloaded_step(config, rank=rank, **steps, **named) for rank in ranks]


def ours(config: Any, how: dict[str, Any]) -> memcalc.Report:
    return memcalc.estimate(
        config,
        engine="deepspeed",
        gpus=how["gpus"],
        zero=how["zero"],
        seq_len=16,
        precision=PRECISIONS[how.get("precision", "bf16")],
        global_batch_size=how["gpus"] * how.get("micro_batches", 1),
        recompute="full" if how.get("recompute") else "none",
        clip_grad_norm=how.get("clipping", 0.0) > 0,
        freeze=FREEZE.get(how.get("frozen", ())),
        offload_optimizer=how.get("optimizer", "cpu"),
        offload_params=how.get("params", "none"),
        **{name: how[name] for name in OPTIONS if name in how},
    )


@each
def test_the_gpus_bytes(config: Any, how: dict[str, Any]) -> None:
    ranks, report = real(config, how), ours(config, how)
    assert report.phases == {phase: max(getattr(rank, phase) for rank in ranks) for phase in report.phases}


@each
def test_the_hosts_bytes_are_those_of_its_ranks(config: Any, how: dict[str, Any]) -> None:
    """All ranks are on one node. What the allocator rounds up is no tensor."""
    kept: Counter[str] = Counter()
    for rank in real(config, how) * (how["gpus"] if how["zero"] == 3 else 1):
        kept.update(rank.host)
    tensors = [item for item in ours(config, how).host if "rounded up" not in item.name]
    assert {kind: n for kind, n in totals(tensors).items() if n} == kept


@each
def test_what_is_sent(config: Any, how: dict[str, Any]) -> None:
    sent: Counter[tuple[str, str]] = Counter()
    for (collective, name, elements), calls in real(config, how)[0].sent.items():
        dtype, itemsize = SIZES[name]
        sent[collective, dtype] += calls * elements * itemsize
    found: Counter[tuple[str, str]] = Counter()
    for one in ours(config, how).collectives:
        found[one.collective, one.dtype] += one.payload
    assert how["gpus"] == 1 or found == sent


PLAYED: list[tuple[Any, dict[str, Any]]] = [
    (LARGE_LLAMA, {"zero": 1, "gpus": 7, "reduce_bucket_size": 2 * 10**7}),
    (LARGE_GPT2, {"zero": 1, "gpus": 2, "global_batch_size": 6, "precision": "fp16-mixed"}),
    (LARGE_LLAMA, {"zero": 2, "gpus": 7}),
    (LARGE_GPT2, {"zero": 2, "gpus": 8, "precision": "fp32", "reduce_bucket_size": 2 * 10**7}),
]


@pytest.mark.parametrize(("config", "options"), PLAYED, ids=str)
def test_a_replay_reserves_what_the_engines_own_sequence_does(config: Any, options: dict[str, Any]) -> None:
    report = memcalc.estimate(config, engine="deepspeed", offload_optimizer="cpu", **{"seq_len": 512, **options})
    run = replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ()))
    assert run is not None and run.steady
    assert run.reserved == most_reserved(report, rank_played(report), run.steps)
