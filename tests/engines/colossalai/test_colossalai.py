"""Grids of tensor-parallel ranks: which there are, what is refused, and what stands beside the layers."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.layout.tensor_dims.grid import Grid, grid_of, near

GPT: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 96, "n_head": 12, "n_layer": 3, "n_positions": 64, "vocab_size": 3600,
}  # fmt: skip
SQUARE: dict[str, Any] = {"gpus": 4, "tp": 4, "tp_dims": "2", "micro_batch_size": 2}


def memory(report: Any) -> dict[str, Any]:
    return report.to_dict()["memory"]


@pytest.mark.parametrize("dims", ["2", "2.5", "3"])
def test_a_grid_has_as_many_ranks_as_were_asked_for(dims: str) -> None:
    for ranks in range(1, 200):
        grid = grid_of(dims, ranks)
        squares = {d * q * q for q in range(2, 15) for d in range(1, q + 1)}
        exists = {
            "2": ranks in {q * q for q in range(2, 15)}, "2.5": ranks in squares, "3": ranks in {8, 27, 64, 125},
        }  # fmt: skip
        assert (grid is not None) == exists[dims]
        if grid is not None:
            assert grid.ranks == ranks
            continue
        below_and_above = near(dims, ranks)
        assert all(grid_of(dims, n) is not None for n in below_and_above)
        between = range(min(below_and_above) + 1 if min(below_and_above) < ranks else 1, max(below_and_above))
        assert all(grid_of(dims, n) is None for n in between if n != ranks)


def test_the_depth_is_the_most_that_is_not_above_the_side() -> None:
    assert grid_of("2.5", 8) == Grid("2.5", 2, 2)
    assert grid_of("2.5", 64) == Grid("2.5", 4, 4)
    assert grid_of("2.5", 16, 4) == Grid("2.5", 2, 4)  # a given depth may be above
    assert grid_of("2.5", 16, 2) is None
    assert near("2.5", 8, 3) == [12]


@pytest.mark.parametrize("dims", [2, 2.0, "2"])
def test_numbers_are_as_good_as_text(dims: Any) -> None:
    assert memcalc.estimate(GPT, **SQUARE | {"tp_dims": dims}).setup.tp_dims == "2"
    assert memcalc.estimate(GPT, tp_dims=2.5, gpus=8, tp=8, micro_batch_size=4).setup.tp_depth == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 8, "gpus": 8}, "--tp-dims 2: needs a tp of q² with a side of 2 or more, not 8; allowed: 1, or --tp 4 or --tp 9"),
        ({"tp_dims": "3"}, "--tp-dims 3: needs a tp of l³ with a side of 2 or more, not 4; allowed: 1, or --tp 8"),
        ({"tp_dims": "2.5", "tp_depth": 3}, "--tp-dims 2.5: needs a tp of 3·q² with a side of 2 or more, not 4"),
        ({"tp": 1, "gpus": 1}, "--tp-dims 2: needs a tp of q² with a side of 2 or more, not 1; allowed: 1, or --tp 4"),
        ({"tp_dims": "4"}, "--tp-dims 4: allowed: 1, 2, 2.5, 3"),
        ({"tp_dims": True}, "--tp-dims True: allowed: 1, 2, 2.5, 3"),
        ({"tp_depth": 2}, "--tp-depth 2: is the depth of two and a half dimensions"),
        ({"engine": "megatron"}, "--tp-dims 2: megatron cuts tensors in one dimension"),
        ({"micro_batch_size": 3}, "--micro-batch-size 3: 2D .* into 2 equal parts; allowed: a multiple of 2"),
        ({"zero": 1}, "--zero 1: engine colossalai shards nothing"),
        ({"recompute": "full"}, "--recompute full: with engine colossalai"),
        ({"attention": "sdpa"}, "--attention sdpa: titans' GPT stores all scores"),
        ({"cross_entropy": "eager"}, "--cross-entropy eager: Colossal-AI's loss"),
        ({"precision": "bf16-autocast"}, "--precision bf16-autocast: with engine colossalai"),
        ({"padded": True}, "--padded on: "),
        ({"kernels": "fused"}, "--kernels fused: "),
        ({"optimizer": "muon"}, "--optimizer muon: "),
        ({"global_batch_size": 4}, "--global-batch-size 4: gradient accumulation"),
        ({"seq_len": 1}, "--seq-len 1: titans' loss leaves out"),
        ({"gpus": 8, "pp": 2}, "--pp 2: with engine colossalai"),
        ({"gpus": 8, "cp": 2}, "--cp 2: with engine colossalai"),
        ({"lora_rank": 2}, "--lora-rank 2: "),
        ({"freeze": "norms"}, "--freeze norms: "),
        ({"shard_group": 1, "gpus": 8}, "--shard-group 1: engine colossalai shards nothing"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(memcalc.InputError, match="^" + said.replace("(", r"\(")) as error:
        memcalc.estimate(GPT, **SQUARE | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"n_head": 3}, "has 3 attention heads"),
        ({"n_embd": 90, "n_head": 2}, "has 90 hidden, and 2D .* a multiple of 4"),
        ({"n_inner": 90}, "has 90 ffn"),
        ({"vocab_size": 2048}, "has 2048 tokens"),
        ({"n_positions": 2051}, "has 2051 positions"),
        ({"activation_function": "relu"}, "has the activation relu"),
        ({"tie_word_embeddings": False}, "has a head of its own"),
    ],
)  # fmt: skip
def test_models_that_the_grid_does_not_cut(model: dict[str, Any], said: str) -> None:
    with pytest.raises(memcalc.InputError, match=said):
        memcalc.estimate(GPT | model, **SQUARE)


def test_a_vocabulary_is_padded_to_equal_parts() -> None:
    report = memcalc.estimate("gpt2", **SQUARE)
    (table,) = (i for i in report.items if i.component == "parameters" and "word" in i.name)
    assert table.nbytes == 2 * (50258 // 2) * (768 // 2)


def test_gradients_of_copies_are_reduced_as_one_flat_tensor() -> None:
    """bucket_allreduce (colossalai/legacy/engine/gradient_handler/utils.py): a copy of all gradients of a rank."""
    report = memcalc.estimate(GPT, gpus=16, tp=8, tp_dims="2.5", micro_batch_size=4, precision="fp32", seq_len=2)
    parameters = memory(report)["parameters"]
    sent = {c.name: c for c in report.collectives if c.name.startswith("gradients")}
    assert {(c.axis, c.group_size, c.calls, c.payload) for c in sent.values()} == {
        ("tp", 2, 1, parameters), ("dp", 2, 1, parameters),
    }  # fmt: skip
    batch = 8 * 4 * 2
    assert report.to_dict()["memory"]["phases"]["backward"] >= 3 * parameters + batch


@pytest.mark.parametrize(("precision", "each", "logits"), [("fp32", 16, 1), ("bf16", 8, 1), ("bf16-mixed", 16, 2)])
def test_states(precision: str, each: int, logits: int) -> None:
    """Weights, gradients and Adam's states of a rank's part. A mixed precision has fp32 weights, and logits cast to fp32."""
    report = memcalc.estimate(GPT, **SQUARE, precision=precision, seq_len=8)
    held = sum(memory(report)[of] for of in ("parameters", "gradients", "optimizer_states"))
    steps = 4 * 54  # one fp32 count for each parameter
    assert held - each * memory(report)["parameters"] // (4 if precision == "fp32" else 2) <= steps
    names = [i.name for i in report.items if "logits in fp32" in i.name]
    assert bool(names) == (logits == 2)


def test_columns_side_by_side() -> None:
    from memcalc.decisions.compare import compare

    fixed: dict[str, Any] = {"gpus": 8, "tp": 8, "micro_batch_size": 4, "engine": "colossalai"}
    found = compare(GPT | {"n_head": 16}, tp_dims=["1", "2", "2.5", "3"], **fixed)
    errors = [column.error for column in found.columns]
    assert [error is None for error in errors] == [True, False, True, True]
    assert "--tp-dims 2: needs a tp of q²" in str(errors[1])
