"""torch 2.13's `fully_shard` under CPUOffloadPolicy: bytes of the GPU, bytes of the host, copies, collectives."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from fsdp2_offload_oracle import fsdp2_offload_step
from param_offload_oracle import Moved

import memcalc
from memcalc.engines.transfers import transfers
from memcalc.errors import InputError
from memcalc.offload.host import totals

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "head_dim": 16}  # fmt: skip
TIED_GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 501,
             "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
FROZEN = ("model.embed_tokens", "model.layers.0.")
PRECISIONS = {
    (torch.float32, torch.bfloat16): "bf16-mixed",
    (torch.float32, None): "fp32",
    (torch.bfloat16, None): "bf16",
}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (LLAMA, {"mesh": (2,)}),
    (TIED_GPT2, {"mesh": (3,), "clips": True}),
    (LLAMA, {"mesh": (3,), "reshards": False, "policy": None}),
    (TIED_GPT2, {"mesh": (2,), "recompute": True, "dtype": torch.bfloat16, "policy": None}),
    (LLAMA, {"mesh": (1,)}),
    (LLAMA, {"mesh": (1,), "policy": None, "recompute": True}),
    (LLAMA, {"mesh": (2, 2)}),
    (LLAMA, {"mesh": (2,), "micro_batches": 3, "syncs": False}),
    (TIED_GPT2, {"mesh": (2,), "micro_batches": 2}),
    (LLAMA, {"mesh": (2,), "frozen": FROZEN}),
]
MUCH_LIKE_OTHERS = (0, 4, 5, 8)
each = pytest.mark.parametrize(
    ("config", "how"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i in MUCH_LIKE_OTHERS)) for i, case in enumerate(CASES)],
    ids=str,
)


@cache
def _real(case: int, rank: int) -> Moved:
    config, how = CASES[case]
    return fsdp2_offload_step(config, rank=rank, **how)


def real(config: Any, how: dict[str, Any], rank: int = 0) -> Moved:
    return _real(CASES.index((config, how)), rank)


def ours(config: Any, how: dict[str, Any]) -> memcalc.Report:
    gpus = prod(how["mesh"])
    return memcalc.estimate(
        config,
        engine="fsdp2",
        gpus=gpus,
        zero=3 if how.get("reshards") is None else 2,
        shard_group=how["mesh"][-1],
        seq_len=16,
        precision=PRECISIONS[how.get("dtype", torch.float32), how.get("policy", torch.bfloat16)],
        global_batch_size=gpus * how.get("micro_batches", 1),
        recompute="full" if how.get("recompute") else "none",
        sync_each_micro_batch=how.get("syncs", True) if how.get("micro_batches", 1) > 1 else None,
        clip_grad_norm=how.get("clips", False),
        freeze="embeddings,first:1" if how.get("frozen") else None,
        offload_params="cpu",
    )


@each
def test_the_gpus_bytes(config: Any, how: dict[str, Any]) -> None:
    assert ours(config, how).phases == real(config, how).phases


@each
def test_the_hosts_bytes_are_those_of_its_ranks(config: Any, how: dict[str, Any]) -> None:
    """All ranks are on one node; most is pinned before the step. What the allocator rounds up is no tensor."""
    kept: Counter[str] = Counter()
    for rank in range(prod(how["mesh"])):
        one = real(config, how, rank)
        kept.update({"paged": one.host["paged"], "pinned": one.most_host["pinned"]})
    tensors = [item for item in ours(config, how).host if "rounded up" not in item.name]
    assert {kind: n for kind, n in totals(tensors).items() if n} == kept


@each
def test_what_is_sent(config: Any, how: dict[str, Any]) -> None:
    sent: Counter[str] = Counter()
    for (name, _, nbytes), calls in real(config, how).sent.items():
        sent[name] += calls * nbytes
    found: Counter[str] = Counter()
    for one in ours(config, how).collectives:
        found[one.collective] += one.payload
    assert prod(how["mesh"]) == 1 or found == sent


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"offload_params": "nvme"}, "--offload-params nvme: FSDP2's CPUOffloadPolicy has no files"),
        ({"offload_optimizer": "cpu"}, "--offload-optimizer cpu: FSDP2's CPUOffloadPolicy moves weights and optimizer"),
        ({"offload_params": "cpu", "tp": 2}, "--offload-params cpu: with --tp 2"),
        ({"offload_params": "cpu", "optimizer": "sgd"}, "--offload-params cpu: with optimizer sgd"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError) as error:
        memcalc.estimate("llama-7b", engine="fsdp2", gpus=4, **options)
    assert str(error.value).startswith(why)


@each
def test_what_is_copied(config: Any, how: dict[str, Any]) -> None:
    report = ours(config, how)
    found: Counter[tuple[str, str]] = Counter()
    for one in transfers(report.model, report.setup, report.rank):
        found[one.phase, one.way] += one.nbytes
    assert found == real(config, how).copied
