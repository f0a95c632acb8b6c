"""DeepSpeed 0.19.8 itself with its weights on the host: bytes of the GPU, bytes of the host, copies, collectives."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from deepspeed_oracle import OPTIONS, PRECISIONS
from engines.deepspeed.offloaded_traffic import estimated_copies, estimated_payloads, payloads
from param_offload_oracle import Moved, param_offload_step

import memcalc
from memcalc.offload.host import totals

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "head_dim": 16}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 701}
TIED_GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 501,
             "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
ALONE = {"max_live_parameters": 0, "max_reuse_distance": 0, "prefetch_bucket_size": 0}
"""Each module gathers its own weights, one by one, and keeps none."""

CASES: list[tuple[Any, dict[str, Any]]] = [
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "optimizer": "cpu"}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "param_persistence_threshold": 5000}),
    (LLAMA, {"gpus": 3, "reduce_bucket_size": 40_000, "param_persistence_threshold": 0, **ALONE}),
    (TIED, {"gpus": 2, "reduce_bucket_size": 20_000, "precision": "fp32", "micro_batches": 2, "recompute": True,
            "param_persistence_threshold": 100}),
    (TIED, {"gpus": 2, "reduce_bucket_size": 20_000, "optimizer": "cpu", "micro_batches": 2, "recompute": True,
            "param_persistence_threshold": 0, "sub_group_size": 30_000}),
    (TIED_GPT2, {"gpus": 1, "reduce_bucket_size": 10**6, "param_persistence_threshold": 1000}),
    (TIED_GPT2, {"gpus": 1, "reduce_bucket_size": 10**6, "optimizer": "cpu"}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "frozen": ("model.embed_tokens", "model.layers.0."),
             "param_persistence_threshold": 3000}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "frozen": ("model.embed_tokens",), "optimizer": "cpu"}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "clipping": 1.0}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "clipping": 1.0, "optimizer": "cpu"}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "precision": "fp16", "param_persistence_threshold": 5000}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "precision": "fp16", "optimizer": "cpu", "clipping": 1.0}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "param_persistence_threshold": 0, "precision": "fp16",
             "optimizer": "cpu", "sub_group_size": 20_000}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "precision": "fp16", "optimizer": "cpu", "params": "none"}),
    (LLAMA, {"gpus": 2, "reduce_bucket_size": 40_000, "clipping": 1.0, "optimizer": "cpu", "params": "none",
             "param_persistence_threshold": 0}),
]  # fmt: skip
each = pytest.mark.parametrize(("config", "how"), CASES, ids=str)
FREEZE = {("model.embed_tokens", "model.layers.0."): "embeddings,first:1", ("model.embed_tokens",): "embeddings"}


@cache
def _real(case: int) -> Moved:
    config, how = CASES[case]
    return param_offload_step(config, **{OPTIONS.get(name, name): value for name, value in how.items()})


def real(config: Any, how: dict[str, Any]) -> Moved:
    """A steady step of the first rank: the ranks of ZeRO-3 are alike."""
    return _real(CASES.index((config, how)))


def ours(config: Any, how: dict[str, Any]) -> memcalc.Report:
    return memcalc.estimate(
        config,
        engine="deepspeed",
        gpus=how["gpus"],
        zero=3,
        seq_len=16,
        precision=PRECISIONS[how.get("precision", "bf16")],
        global_batch_size=how["gpus"] * how.get("micro_batches", 1),
        recompute="full" if how.get("recompute") else "none",
        clip_grad_norm=how.get("clipping", 0.0) > 0,
        freeze=FREEZE.get(how.get("frozen", ())),
        offload_optimizer=how.get("optimizer", "none"),
        offload_params=how.get("params", "cpu"),
        **{name: how[name] for name in OPTIONS if name in how},
    )


@pytest.mark.slow
@each
def test_the_gpus_bytes(config: Any, how: dict[str, Any]) -> None:
    assert ours(config, how).phases == real(config, how).phases


@each
def test_the_hosts_bytes_are_those_of_its_ranks(config: Any, how: dict[str, Any]) -> None:
    """All ranks are on one node. What the allocator rounds up is no tensor."""
    kept = {kind: how["gpus"] * n for kind, n in real(config, how).host.items()}
    tensors = [item for item in ours(config, how).host if "rounded up" not in item.name]
    assert {kind: n for kind, n in totals(tensors).items() if n} == kept


@each
def test_what_is_sent(config: Any, how: dict[str, Any]) -> None:
    assert how["gpus"] == 1 or estimated_payloads(ours(config, how)) == payloads(real(config, how).sent)


@each
def test_what_is_copied(config: Any, how: dict[str, Any]) -> None:
    assert how.get("params") == "none" or estimated_copies(ours(config, how)) == real(config, how).copied
