"""FSDP2 over transformers' tensor parallelism against the real two: every parameter's shard, every phase's peak and every
collective, byte for byte, on rank 0 of a fake process group."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from cases import step_cases
from fsdp2_oracle import ranks, sharded_step, split
from oracle import build
from steps_compared import check_step, check_step_and_forward, of_the_plan, phases
from tensor_parallel_cases import config_of
from torch.distributed.device_mesh import init_device_mesh

import memcalc
from memcalc.estimation.report import Report
from memcalc.families import FAMILIES, support_of, supporting
from memcalc.layout import tensor_parallel

PLANS = supporting(lambda s: s.tensor_parallel)
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 300,
}  # fmt: skip
BIASED = {"attention_bias": True, "mlp_bias": True}
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
FOUR = {"mesh": (2,), "tensor_parallel": 2, "micro_batch_size": 2, "seq_len": 33}
"""Two data-parallel groups of two tensor-parallel ranks."""
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "zero 3": ({}, {}, {}),
    "biases": (BIASED, {}, {}),
    "biases, a small vocabulary": (BIASED | {"vocab_size": 40}, {"micro_batch_size": 1}, {"micro_batch_size": 1}),
    "zero 2, tied": ({"tie_word_embeddings": True}, {"zero": 2}, {"reshards": False}),
    "seven layers, recompute": ({"num_hidden_layers": 7}, {"recompute": "full"}, {"recompute": True}),
    "seven layers, recompute op": ({"num_hidden_layers": 7}, {"recompute": "op"}, {"recompute": "op"}),
    "dp 1, tp 4, fp32": (
        {"num_key_value_heads": 4},
        {"gpus": 4, "tp": 4, "precision": "fp32"},
        {"mesh": (1,), "tensor_parallel": 4, "policy": None},
    ),
    "uneven dp": ({}, {"gpus": 14}, {"mesh": (7,)}),
    "uneven vocab and ffn": ({"vocab_size": 301, "intermediate_size": 97}, {}, {}),
    "hybrid": (BIASED, {"gpus": 8, "shard_group": 2}, {"mesh": (2, 2)}),
    "eager, three micro-batches": (
        {},
        {"attention": "eager", "global_batch_size": 12, "sync_each_micro_batch": True},
        {"attention": "eager", "micro_batches": 3},
    ),
    "gradients of three micro-batches reduced with the last": (
        BIASED,
        {"global_batch_size": 12},
        {"micro_batches": 3, "syncs": False},
    ),
    "bf16, tied, gradients of two micro-batches reduced with the last, few tokens": (
        {"tie_word_embeddings": True},
        {"global_batch_size": 4, "precision": "bf16", "micro_batch_size": 1, "seq_len": 4},
        {
            "micro_batches": 2,
            "syncs": False,
            "policy": None,
            "dtype": torch.bfloat16,
            "micro_batch_size": 1,
            "seq_len": 4,
        },
    ),
    "few tokens": ({}, {"micro_batch_size": 1, "seq_len": 4}, {"micro_batch_size": 1, "seq_len": 4}),
    "few tokens, dp 1": (  # a shard is cast and copied, and nothing is gathered
        {"vocab_size": 3000},
        {"gpus": 2, "micro_batch_size": 1, "seq_len": 2},
        {"mesh": (1,), "micro_batch_size": 1, "seq_len": 2},
    ),
    "few tokens, tied": (
        {"tie_word_embeddings": True},
        {"micro_batch_size": 1, "seq_len": 4},
        {"micro_batch_size": 1, "seq_len": 4},
    ),
}


def both(config: dict[str, Any], options: dict[str, Any], real: dict[str, Any]) -> tuple[Report, Any]:
    theirs = sharded_step(dict(config), **FOUR | {"implementation": "fused"} | real)
    workload = {name: (FOUR | real)[name] for name in ("micro_batch_size", "seq_len")}
    setup = {"gpus": 4, "tp": 2, "zero": 3, "optimizer_implementation": "fused"} | workload
    return memcalc.estimate(dict(config), **setup | options), theirs


@pytest.mark.parametrize("name", SETUPS)
def test_a_step(name: str) -> None:
    fields, options, real = SETUPS[name]
    check_step(*both(LLAMA | fields, options, real))


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "phi", "cohere"])
def test_a_step_of_another_family(model_type: str) -> None:
    config = config_of(model_type)
    kind = memcalc.load_model(config).program.attention_kinds[0]
    check_step(*both(config, {"attention": kind}, {"attention": kind}))


THREE: tuple[dict[str, Any], dict[str, Any]] = ({"gpus": 6, "tp": 3}, {"tensor_parallel": 3})
ALONE: tuple[dict[str, Any], dict[str, Any]] = ({"gpus": 3, "tp": 3}, {"mesh": (1,), "tensor_parallel": 3})
FULL: tuple[dict[str, Any], dict[str, Any]] = ({"recompute": "full"}, {"recompute": True})
OP: tuple[dict[str, Any], dict[str, Any]] = ({"recompute": "op"}, {"recompute": "op"})
FEW: tuple[dict[str, Any], dict[str, Any]] = ({"micro_batch_size": 1, "seq_len": 4},) * 2
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
FIVE_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80, "intermediate_size": 97}
"""None of which three ranks have equal parts of."""
SMALL = UNTIED | {"vocab_size": 40, "num_hidden_layers": 2}
"""Of which the layers, not the logits, set the peak."""
WINDOWED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GATHERED: list[tuple[str, dict[str, Any], tuple[tuple[dict[str, Any], dict[str, Any]], ...]]] = [
    ("olmo2", SMALL | FIVE_HEADS | {"attention_bias": True}, (THREE, OP)),
    ("olmo3", TIED | WINDOWED, (FULL,)),
    ("olmo_hybrid", UNTIED | FIVE_HEADS, (THREE, FEW)),
    ("phi3", SMALL, (OP,)),
    ("phi3", TIED | FIVE_HEADS, (ALONE,)),
    ("glm", SMALL | {"attention_bias": False}, (OP,)),
    ("glm4", TIED | {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3}, (THREE, FULL)),
    ("qwen3_5_text", TIED | {"attention_bias": True, "intermediate_size": 97}, ()),
    ("helium", SMALL | {"attention_bias": True, "mlp_bias": True}, (FULL,)),
]
"""Families with layers whose outputs are gathered or whose inputs are cut, and Helium."""


@pytest.mark.parametrize(("model_type", "fields", "setups"), GATHERED)
def test_a_step_and_its_forward(model_type: str, fields: dict[str, Any], setups: Any) -> None:
    options, real = ({name: value for one in setups for name, value in one[i].items()} for i in (0, 1))
    check_step_and_forward(*both(config_of(model_type) | fields, options, real))


def test_foreach_has_a_temporary_of_the_larger_of_two_groups() -> None:
    report, real = both(LLAMA, {"optimizer_implementation": "foreach"}, {"implementation": "foreach"})
    counters = 4 * len(report.model.weights())  # of CPU tensors they are on the same device
    assert phases(report)[2] == real.step - counters


def test_what_transformers_splits_nothing_of() -> None:
    """Every family without a plan here, on the meta device."""
    empty: list[str] = []
    for model_type in set(FAMILIES) - {*PLANS} - {*supporting(lambda s: s.tensor_parallel_fails)}:
        config = step_cases(model_type)[0].fields
        with torch.device("meta"):
            model: Any = build(config, memcalc.load_model(config).program.attention_kinds[0], torch.float32)
        if not model.tp_plan:
            empty.append(model_type)
    assert sorted(empty) == sorted(supporting(lambda s: s.tensor_parallel == {}))


@pytest.mark.parametrize("model_type", PLANS)
def test_the_plan_and_every_shard_are_transformers(model_type: str) -> None:
    config = config_of(model_type)
    kind = memcalc.load_model(config).program.attention_kinds[0]
    with ranks(2), torch.device("meta"):
        model: Any = build(config, kind, torch.float32)
        assert dict(model.tp_plan) == support_of(model_type).tensor_parallel
        split(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    theirs = {n: tuple(getattr(p, "_local_tensor", p).shape) for n, p in model.named_parameters()}
    program = memcalc.load_model(config).program
    own = tensor_parallel.split(program, support_of(model_type).tensor_parallel, 2)
    ours = {w.name.replace("*", str(w.layer), 1): tuple(d.size for d in w.shape) for w in own.weights()}
    assert ours == theirs
    group = own.tensor_parallel
    assert group is not None
    meshes = {n: hasattr(p, "_local_tensor") for n, p in model.named_parameters()}
    assert {n: group.is_split(_class(n)) for n in meshes} == meshes
    _shards_sum_to_the_whole(list(program.weights()), list(own.weights()), group.is_split)


def _class(name: str) -> str:
    """The name of a weight with a `*` for the number of its layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _shards_sum_to_the_whole(whole: list[Any], parts: list[Any], is_split: Any) -> None:
    for one, part in zip(whole, parts, strict=True):
        size, of_one = (prod(d.size for d in w.shape) for w in (one, part))
        replicated = not is_split(one.name) or (one.name.endswith(".bias") and size == of_one)
        assert size == of_one * (1 if replicated else 2), one.name


@pytest.mark.parametrize(("tp", "heads"), [(2, {}), (4, {"num_key_value_heads": 4}), (8, EIGHT_HEADS)])
def test_torch_s_own_plan_of_column_and_row_parallel_layers_is_the_same_step(tp: int, heads: dict[str, Any]) -> None:
    """`parallelize_module` with ColwiseParallel and RowwiseParallel: what it holds and sends is what transformers' plan does."""
    config = LLAMA | heads
    real = {"mesh": (1,), "tensor_parallel": tp, "plan": "dtensor"}
    report, theirs = both(config, {"gpus": tp, "tp": tp}, real)
    check_step(report, theirs)
    shallow = sharded_step(config | {"num_hidden_layers": 1}, **FOUR | {"implementation": "fused"} | real)
    each = 2 * 33 * 48 * 2
    layer = {("forward", "all_reduce", each): 2, ("backward", "all_reduce", each): 5}
    assert Counter(theirs.split) - Counter(shallow.split) == layer


def test_transformers_itself_cannot_split_a_head() -> None:
    """What `--tp` is refused for: with one key/value head a rank's part is no whole head, and its view of heads fails."""
    with pytest.raises(RuntimeError, match=r"shape .* is invalid"):
        sharded_step(LLAMA | {"num_key_value_heads": 1}, **FOUR)


def test_five_all_reduces_of_a_layer_in_backward_and_two_in_forward() -> None:
    layers = {
        depth: of_the_plan(memcalc.estimate(LLAMA | {"num_hidden_layers": depth}, gpus=2, tp=2, zero=3, seq_len=32))
        for depth in (20, 21)
    }
    each = 32 * 48 * 2
    assert layers[21] - layers[20] == {("forward", "all_reduce", each): 2, ("backward", "all_reduce", each): 5}


def test_the_gradient_of_a_tied_table_is_this_rank_s_part_and_that_of_an_untied_one_is_the_whole_until_it_is_reduced() -> (
    None
):
    def gradients(*, tied: bool) -> list[tuple[str, ...]]:
        report = memcalc.estimate(LLAMA | {"tie_word_embeddings": tied}, gpus=4, tp=2, zero=3, seq_len=32)
        rows = report.rank.profiles[0].run.rows
        return [
            tuple(dim.name for dim in row.shape)
            for row in rows
            if row.component == "gradients" and row.name == "model.embed_tokens.weight"
        ]

    assert gradients(tied=True) == [("vocab/tp", "hidden")]
    assert gradients(tied=False) == [("vocab", "hidden"), ("vocab/tp", "hidden")]


def test_degree_one_is_no_op() -> None:
    one = memcalc.estimate(LLAMA, gpus=2, tp=1, zero=3, engine="fsdp2", seq_len=32)
    assert one.rank.profiles[0].run.sent == ()
    assert {c.axis for c in one.collectives} == {"dp"}


def test_pure_tensor_parallelism_sends_nothing_over_dp() -> None:
    report = memcalc.estimate(LLAMA, gpus=2, tp=2, zero=3, seq_len=32)
    assert report.setup.dp == 1
    assert {c.axis for c in report.collectives} == {"tp"}


def test_replicas_are_told_from_none_on_one_model() -> None:
    """A model keeps what its setups hold: four GPUs of one shard are not two such groups."""
    setup: dict[str, Any] = {"zero": 3, "engine": "fsdp2", "seq_len": 4, "shard_group": 4, "grad_dtype": "bf16"}
    model = memcalc.load_model(LLAMA)
    memcalc.estimate(model, gpus=4, **setup)
    assert phases(memcalc.estimate(model, gpus=8, **setup)) == phases(memcalc.estimate(LLAMA, gpus=8, **setup))


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("llama-7b", {"gpus": 12, "tp": 8}, "--gpus 12: is not divisible by tp 8; allowed: a multiple of 8"),
        ("llama-7b", {"gpus": 3, "tp": 3}, "--tp 3: llama-7b has 32 attention heads, and transformers' tensor parallelism"),
        ("llama-3-70b", {"gpus": 16, "tp": 16}, "--tp 16: llama-3-70b has 8 key/value heads, and transformers' tensor"),
        ("pythia-160m", {"gpus": 2, "tp": 2}, "--tp 2: with engine fsdp2 for a gpt_neox is not modelled by this version"),
        ("gpt2", {"gpus": 2, "tp": 2}, "--tp 2: with engine fsdp2: transformers' tp_plan of a gpt2 is empty; allowed: 1"),
        (
            LLAMA | {"model_type": "olmo", "clip_qkv": 8.0},
            {"gpus": 2, "tp": 2},
            "whose clip_qkv is set; allowed: 1",
        ),
        ("llama-7b", {"gpus": 2, "tp": 2, "kernels": "fused"}, "--kernels fused: with engine fsdp2 and tp above 1 is not"),
        ("llama-7b", {"gpus": 2, "tp": 2, "precision": "bf16-autocast"}, "--precision bf16-autocast: with engine fsdp2"),
        ("llama-7b", {"gpus": 2, "tp": 2, "engine": "none"}, "--engine none: runs on 1 GPU, not on 2; allowed: fsdp2"),
        (
            {"model_type": "qwen3_5_text", "linear_num_value_heads": 3, "linear_num_key_heads": 3, "num_attention_heads": 4,
             "num_key_value_heads": 4, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 96},
            {"gpus": 4, "tp": 4, "seq_len": 32, "engine": "fsdp2"}, "value heads of linear attention",
        ),
    ],
)  # fmt: skip
def test_refused_by_name(model: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, zero=3, **options)
    assert line in str(error.value)


def test_model_states_of_a_size_are_16_bytes_over_all_gpus() -> None:
    assert memcalc.estimate(params=2**30, tp=8, zero=3, gpus=64).peak == 16 * 2**30 // 64
