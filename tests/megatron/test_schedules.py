"""Schedules against the published numbers of micro-batches in flight, and against what every schedule has to do."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import on_record

import memcalc
from memcalc.megatron.schedules import (
    actions,
    bubble,
    layers_of_chunks,
    spans_of,
    states,
    zero_bubble_in_flight,
    zero_bubble_order,
)


@given(ranks=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_one_forward_one_backward_has_p_minus_r_in_flight(ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        most = max(sum(state.in_flight) for state in states("1f1b", rank, ranks, micro_batches))
        assert most + 1 == min(micro_batches, ranks - rank)
        assert max(sum(s.in_flight) for s in states("gpipe", rank, ranks, micro_batches)) + 1 == micro_batches


@given(ranks=st.integers(2, 8), groups=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaved_chunks_in_flight(ranks: int, groups: int, chunks: int) -> None:
    """min(vm, 2(p-r-1) + (v-1)p + 1) chunks (megatron/core/pipeline_parallel/schedules.py)."""
    m = groups * ranks
    for rank in range(ranks):
        most = max(sum(state.in_flight) for state in states("interleaved", rank, ranks, m, chunks))
        assert most + 1 == min(chunks * m, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@given(ranks=st.integers(2, 6), groups=st.integers(1, 3), chunks=st.integers(2, 3))
def test_every_forward_has_its_backward_after_it(schedule: str, ranks: int, groups: int, chunks: int) -> None:
    chunks = chunks if schedule == "interleaved" else 1
    for rank in range(ranks):
        live: Counter[int] = Counter()
        done: Counter[str] = Counter()
        for kind, chunk in actions(schedule, rank, ranks, groups * ranks, chunks):
            live[chunk] += 1 if kind == "forward" else -1
            assert live[chunk] >= 0
            done[kind] += 1
        assert done == {"forward": groups * ranks * chunks, "backward": groups * ranks * chunks}


def test_bubbles() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2."""
    assert bubble("1f1b", 8, 64) == bubble("gpipe", 8, 64) == 7 / 64
    assert bubble("1f1b", 16, 1) == 15  # one micro-batch goes through all stages
    assert bubble("interleaved", 8, 64, 3) == 7 / (3 * 64)


def test_layers_are_spread_evenly_or_not_at_all() -> None:
    assert layers_of_chunks(12, 6) == [2] * 6
    assert layers_of_chunks(126, 16) == [7, *[8] * 14, 7]  # Llama 3 405B, with the embedding and the head
    assert layers_of_chunks(31, 4) == [8, 8, 8, 7]
    assert layers_of_chunks(6, 8) == [0, *[1] * 6, 0]
    assert layers_of_chunks(6, 7) == [*[1] * 6, 0]
    assert layers_of_chunks(61, 16, last=1) == [*[4] * 15, 1]
    assert layers_of_chunks(10, 2, 4, 6) == [4, 6]
    with pytest.raises(ValueError, match="12 layers less 5 do not divide by 2"):
        layers_of_chunks(12, 3, first=5)
    with pytest.raises(ValueError, match=r"12 layers, .* do not divide by 8"):
        layers_of_chunks(12, 8)
    with pytest.raises(ValueError, match=r"12 layers, .* do not divide by 15"):
        layers_of_chunks(12, 15)


@pytest.mark.parametrize(
    ("layers", "ranks", "chunks"), [(12, 4, 1), (6, 2, 4), (6, 8, 1), (6, 7, 1), (31, 4, 1), (14, 2, 4), (15, 4, 4)]
)
def test_layers_are_spread_as_megatron_spreads_them(layers: int, ranks: int, chunks: int) -> None:
    spans = spans_of(layers, ranks, chunks)
    usual = max(span.layers for of_rank in spans for span in of_rank)
    fewer = spans[0][0].layers < usual, spans[-1][-1].layers < usual
    assert [[span.layers for span in of_rank] for of_rank in spans] == layers_built(layers, ranks, chunks, fewer)


@on_record
def layers_built(layers: int, ranks: int, chunks: int, fewer: tuple[bool, bool]) -> list[list[int]]:
    """Layers of each rank's chunks. `fewer`: whether the embedding and the loss count as one."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, pipeline_dtype=torch.bfloat16,
        account_for_embedding_in_pipeline_split=fewer[0], account_for_loss_in_pipeline_split=fewer[1],
    )  # fmt: skip
    return [
        [get_num_layers_to_build(config, chunk if chunks > 1 else None, rank) for chunk in range(chunks)]
        for rank in range(ranks)
    ]


def test_chunks_go_round() -> None:
    spans = spans_of(12, 2, 3)
    assert [[span.start for span in of_rank] for of_rank in spans] == [[0, 4, 8], [2, 6, 10]]
    assert [span.first for of_rank in spans for span in of_rank] == [True, *[False] * 5]
    assert [span.last for of_rank in spans for span in of_rank] == [*[False] * 5, True]


# --- zero-bubble (ZB-H1, Qi et al. 2023, arXiv 2401.10241)


def _of_torch(rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int]]:
    """The actions of one rank with one stage, as torch's schedule makes them, idle slots left out."""
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    rounds = max(1, micro_batches // ranks)
    schedule: Any = SimpleNamespace(
        n_local_stages=1,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    names = {
        "FORWARD": "forward",
        "BACKWARD_INPUT": "backward of inputs",
        "BACKWARD_WEIGHT": "backward of weights",
    }
    actions = ScheduleInterleavedZeroBubble._calculate_single_rank_operations(schedule, rank)
    return [(names[a.computation_type.name], a.microbatch_index) for a in actions if a is not None]


def test_zero_bubble_is_torchs_order() -> None:
    for ranks in range(1, 7):
        for micro_batches in range(1, 25):
            if micro_batches % max(1, micro_batches // ranks):  # torch refuses these
                continue
            for rank in range(ranks):
                count: Counter[str] = Counter()
                own: list[tuple[str, int]] = []
                for part in zero_bubble_order(rank, ranks, micro_batches):
                    own.append((part, count[part]))
                    count[part] += 1
                assert own == _of_torch(rank, ranks, micro_batches)


@given(ranks=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_zero_bubble_holds_as_much_on_every_rank_as_1f1b_on_its_first(ranks: int, micro_batches: int) -> None:
    """Section 2.3: until the halves for the weights have run, p micro-batches are there on each rank."""
    for rank in range(ranks):
        inputs, weights = zero_bubble_in_flight(rank, ranks, micro_batches)
        assert inputs == min(micro_batches, ranks - rank)
        assert weights == min(micro_batches, ranks)


def _makespan(ranks: int, micro_batches: int, times: dict[str, int]) -> int:
    """When the last rank is done, if each runs its order and waits for what it needs from its neighbours."""
    orders = [list(zero_bubble_order(rank, ranks, micro_batches)) for rank in range(ranks)]
    done: dict[tuple[str, int, int], int] = {}
    clocks, counts = [0] * ranks, [Counter[str]() for _ in range(ranks)]
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                part, i = order[0], counts[rank][order[0]]
                needs = {
                    "forward": [("forward", rank - 1, i)] if rank else [],
                    "backward of inputs": [("forward", rank, i)]
                    + ([("backward of inputs", rank + 1, i)] if rank < ranks - 1 else []),
                    "backward of weights": [("backward of inputs", rank, i)],
                }[part]
                if not all(need in done for need in needs):
                    break
                start = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = done[part, rank, i] = start + times[part]
                counts[rank][part] += 1
                order.pop(0)
    return max(clocks)


@given(ranks=st.integers(1, 7), micro_batches=st.integers(1, 16), times=st.tuples(*[st.integers(1, 5)] * 3))
def test_the_bubble_of_zero_bubble_is_what_running_it_shows(
    ranks: int, micro_batches: int, times: tuple[int, int, int]
) -> None:
    """(p-1)(F + B - W), and (p-m)W with too few micro-batches, where W is the shortest; a third each with equal times."""
    forward, inputs, weights = times[0], max(times[1], times[2]), min(times[1], times[2])
    ran = {"forward": forward, "backward of inputs": inputs, "backward of weights": weights}
    if weights <= forward:
        waits = (ranks - 1) * (forward + inputs - weights) + max(0, ranks - micro_batches) * weights
        assert _makespan(ranks, micro_batches, ran) == micro_batches * (forward + inputs + weights) + waits
    equal = _makespan(ranks, micro_batches, dict.fromkeys(ran, 1)) / (3 * micro_batches) - 1
    assert bubble("zero-bubble", ranks, micro_batches) == pytest.approx(equal, abs=1e-12)


def test_zero_bubble_is_refused_with_its_bubble() -> None:
    with pytest.raises(
        memcalc.InputError, match=r"^--schedule zero-bubble: Megatron-Core has no such schedule, .* 12\.5% .* 37\.5%\)"
    ):
        memcalc.estimate("gpt2", gpus=4, pp=4, schedule="zero-bubble", global_batch_size=8)
