"""What the allocator reserves under FSDP2: the estimate's replay against the sequence of `fully_shard` itself, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp2_events import STREAMS, played, recorded

import memcalc
from memcalc.core.dims import evaluate, numel
from memcalc.device.allocator import SMALL_SEGMENT, CachingAllocator
from memcalc.device.expandable import ExpandableAllocator
from memcalc.device.replay import replayed
from memcalc.device.shown import Workspaces

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
         "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 3, "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 896,
           "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
DEEP = LLAMA | {"num_hidden_layers": 9, "hidden_size": 1024, "intermediate_size": 2816}

CASES = [
    (LLAMA, {"recompute": "full"}),
    (LLAMA, {"shard_group": 4, "grad_dtype": "bf16"}),
    (LLAMA, {}),
    (LLAMA, {"zero": 2, "recompute": "full", "micro_batch_size": 4}),
    (LLAMA, {"recompute": "op", "gpus": 7}),
    (LLAMA, {"precision": "bf16", "clip_grad_norm": True}),
    (LLAMA, {"shard_group": 4, "global_batch_size": 16}),
    (LLAMA, {"gpus": 1, "precision": "bf16-mixed"}),
    (DEEP, {"recompute": "full", "optimizer_implementation": "fused"}),
    (DEEP, {"zero": 2, "recompute": "op", "grad_dtype": "bf16"}),
    (LLAMA, {"tp": 2, "recompute": "full"}),
    (MIXTRAL, {}),
    (MIXTRAL, {"ep": 4, "recompute": "full"}),
]


@pytest.mark.parametrize(("config", "options"), CASES, ids=str)
def test_a_replay_reserves_what_fully_shards_own_sequence_does(config: Any, options: dict[str, Any]) -> None:
    """With segments of either kind. In the one case of selective recomputation without resharding, other small tensors are alive
    when a segment of theirs is reserved: the difference is that segment."""
    report = estimate(config, options)
    runs = {}
    for kind in (CachingAllocator, ExpandableAllocator):
        run = replayed(report.rank, report.setup, kind(), Workspaces((), ()))
        assert run is not None and run.steady
        runs[kind] = run
    events = recorded(report, max(run.steps for run in runs.values()))
    for kind, run in runs.items():
        small = SMALL_SEGMENT if (options.get("recompute"), options.get("zero")) == ("op", 2) else 0
        assert abs(run.reserved - played(events, kind()).most_reserved) <= small


def test_what_is_allocated_on_which_stream() -> None:
    """Of one step, in the order of each stream; all else is on the default one."""
    report = estimate(LLAMA, {"shard_group": 4, "grad_dtype": "bf16"})
    run, batch, seq = report.rank.profiles[0].run, report.setup.micro_batch_size, report.setup.tokens_per_part
    order = report.rank.holdings.order
    assert order is not None and set(order.streams.values()) == set(STREAMS) - {"all-gather"}
    events = recorded(report, 1)
    for name in sorted(set(order.streams.values())):
        rows = [run.rows[i] for i in run.log if i >= 0 and order.streams.get(run.rows[i].name) == name]
        expected = [evaluate(numel(row.shape)[1], batch, seq) * row.dtype.itemsize for row in rows]
        assert [event.nbytes for event in events if event.nbytes and event.stream == name] == expected


def estimate(config: Any, options: dict[str, Any]) -> memcalc.Report:
    return memcalc.estimate(config, **{"engine": "fsdp2", "gpus": 8, "zero": 3, "seq_len": 512, **options})
