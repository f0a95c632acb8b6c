"""What the allocator reserves for DeepSpeed: the estimate's replay against the sequence of its own engine, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_events import played, recorded

import memcalc
from memcalc.allocator import CachingAllocator
from memcalc.device import Workspaces
from memcalc.engines.zero_layout import partitions
from memcalc.replay import replayed
from memcalc.units import MIB

LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
         "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
DEEP = LLAMA | {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1408}
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 1024, "n_head": 16, "vocab_size": 50257, "n_positions": 1024,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 3, "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 896,
           "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
SMALL_SETS = {"sub_group_size": 10**6, "reduce_bucket_size": 3 * 10**7, "prefetch_bucket_size": 10**7,
              "max_live_parameters": 5 * 10**7, "max_reuse_distance": 5 * 10**7}  # fmt: skip

CASES: list[tuple[Any, dict[str, Any]]] = [
    (LLAMA, {"zero": 0, "gpus": 4, "micro_batch_size": 2, "recompute": "full"}),
    (GPT2, {"zero": 0, "gpus": 4, "precision": "fp32"}),
    (LLAMA, {"zero": 1, "gpus": 7, "reduce_bucket_size": 2 * 10**7}),
    (GPT2, {"zero": 1, "gpus": 2, "global_batch_size": 6, "precision": "fp16-mixed"}),
    (LLAMA, {"zero": 2, "gpus": 7}),
    (GPT2, {"zero": 2, "gpus": 8, "precision": "fp32", "global_batch_size": 16}),
    (MIXTRAL, {"zero": 2, "gpus": 8, "ep": 4}),
    (LLAMA, {"zero": 2, "gpus": 8, "cp": 2}),
    (LLAMA, {"zero": 3, "gpus": 3, "micro_batch_size": 2, "seq_len": 999}),
    (DEEP, {"zero": 3, "gpus": 64, **SMALL_SETS}),
    (
        DEEP,
        {"zero": 3, "gpus": 8, "recompute": "full", "micro_batch_size": 4, "param_persistence_threshold": 3 * 10**5},
    ),
    (GPT2, {"zero": 3, "gpus": 8, "precision": "fp16-mixed"}),
    (LLAMA, {"zero": 3, "gpus": 8, "cp": 2}),
]


@pytest.mark.parametrize(("config", "options"), CASES, ids=str)
def test_a_replay_reserves_what_the_engines_own_sequence_does(config: Any, options: dict[str, Any]) -> None:
    report = memcalc.estimate(config, engine="deepspeed", **{"seq_len": 512, **options})
    run = replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ()))
    assert run is not None and run.steady
    real = played(recorded(report, rank_played(report), run.steps))
    assert run.reserved == real.most_reserved


def test_where_the_flat_buffer_has_no_room_beside_the_weights_it_is_made_on_the_cpu() -> None:
    report = memcalc.estimate(LLAMA, engine="deepspeed", zero=2, gpus=64, reduce_bucket_size=10**6, seq_len=64)
    both = 2 * 2 * report.model.num_parameters
    run = replayed(report.rank, report.setup, CachingAllocator(both - MIB), Workspaces((), ()))
    assert run is not None and run.steady and not run.retries
    free = replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ()))
    assert free is not None and free.reserved > both
    real = played(recorded(report, rank_played(report), run.steps, roomy=False))
    assert run.reserved == real.most_reserved


def rank_played(report: memcalc.Report) -> int:
    """The rank whose parts of the flat buffers were replayed."""
    if report.setup.zero not in (1, 2):
        return 0
    order = report.rank.held.order
    assert order is not None and order.scripts is not None
    model, _, own = order.scripts.args  # type: ignore[attr-defined]
    return partitions(model, report.setup.shards).index(own)
