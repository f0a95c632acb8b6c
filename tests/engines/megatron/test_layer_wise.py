"""Muon with Megatron: which weights it updates, and which of them a rank of dist_muon has, against Megatron-Core's own code."""

from __future__ import annotations

from collections import Counter
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import memcalc
from memcalc.core.dims import Dim
from memcalc.engines.megatron.layer_wise import _ranks, is_matrix  # pyright: ignore[reportPrivateUsage]
from memcalc.families.base.module import Weight

GPT = {
    "model_type": "megatron_gpt", "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 96,
    "vocab_size": 512, "max_position_embeddings": 32, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
EXPERTS = {**GPT, "add_bias_linear": False, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def optimizer_states(report: memcalc.Report, what: str) -> int:
    rows = [item for item in report.to_dict()["memory"]["items"] if item["component"] == "optimizer_states"]
    return sum(row["nbytes"] for row in rows if row["name"].endswith(what))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 5, 6, 7, 8, 9), (8, 8, 8, 8, 1, 2), (3,), (5, 1, 5, 1, 5)])
def test_ranks_have_the_weights_that_the_real_optimizer_gives_them(ranks: int, sizes: tuple[int, ...]) -> None:
    pytest.importorskip("megatron.core")
    torch = pytest.importorskip("torch")
    from megatron.core.optimizer import layer_wise_optimizer as real

    groups = [{"params": [torch.nn.Parameter(torch.empty(size)) for size in sizes]}]
    optimizer: Any = SimpleNamespace(pg_collection=SimpleNamespace(dp_cp=ranks, expt_dp=1))
    with mock.patch.multiple(real, get_pg_size=lambda group: group, get_pg_rank=lambda _: 0):
        real.LayerWiseDistributedOptimizer.shard_params(optimizer, [SimpleNamespace(param_groups=groups)])
    theirs = [sorted(p.numel() for p in of_rank) for of_rank in optimizer.dp_cp_params_list]
    counted = Counter(Weight(f"w{size}", (Dim("n", size),), "mlp") for size in sizes)
    ours = [sorted(prod(d.size for d in w.shape) for w in of_rank.elements()) for of_rank in _ranks(counted, ranks)]
    assert ours == theirs


@pytest.mark.parametrize("config", [GPT, EXPERTS], ids=["gpt", "experts"])
def test_muon_updates_the_matrices_that_are_no_ends(config: dict[str, Any]) -> None:
    """A table of positions is one of them. Adam has two moments, Muon one."""
    report = memcalc.estimate(config, engine="megatron", optimizer="muon", seq_len=32)
    matrices = others = 0
    for weight in report.model.program.weights():
        elements = prod(d.size for d in weight.shape)
        ends = weight.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if len(weight.shape) >= 2 and not ends:
            matrices += elements
        else:
            others += elements
    assert optimizer_states(report, "momentum_buffer") == 4 * matrices
    assert optimizer_states(report, "exp_avg") == optimizer_states(report, "exp_avg_sq") == 4 * others
    assert optimizer_states(report, "fp32 main weight") == 4 * (matrices + others)
    assert is_matrix(Weight("embedding.position_embeddings.weight", (Dim("a", 2), Dim("b", 3)), "embedding"))


def test_which_weights_these_are_is_megatrons_rule() -> None:
    """get_megatron_muon_optimizer sorts parameters before it needs an optimizer's package."""
    pytest.importorskip("megatron.core")
    import inspect

    from megatron.core.optimizer import muon

    rule = inspect.getsource(muon.get_megatron_muon_optimizer)
    assert (
        "not getattr(param, 'is_embedding_or_output_parameter', False)\n                and len(param.shape) == 2"
        in rule
    )


def test_dist_muon_keeps_states_of_some_weights_and_gathers_them() -> None:
    setup: dict[str, Any] = {"engine": "megatron", "optimizer": "muon", "seq_len": 32, "gpus": 8}
    one, shared = memcalc.estimate(GPT, **setup), memcalc.estimate(GPT, **setup, zero=1)
    whole = optimizer_states(one, "fp32 main weight")
    assert whole / 8 < optimizer_states(shared, "fp32 main weight") < whole
    assert one.total("gradients") == shared.total("gradients")
    sent = {c.name: (c.collective, c.payload) for c in shared.collectives if c.axis == "dp"}
    parameters = one.total("parameters")
    assert sent["main gradients"] == ("all_reduce", 2 * parameters)
    assert sent["updated weights"] == ("all_gather", parameters)
    assert "updated weights" not in {c.name for c in one.collectives}


def test_experts_are_given_to_the_ranks_that_have_them() -> None:
    setup: dict[str, Any] = {"engine": "megatron", "optimizer": "muon", "seq_len": 32, "gpus": 8}
    alone = memcalc.estimate(EXPERTS, **setup, zero=1, ep=8)
    shared = memcalc.estimate(EXPERTS, **setup, zero=1, ep=4)
    assert alone.peak < memcalc.estimate(EXPERTS, **setup, ep=8).peak
    assert shared.total("parameters") > alone.total("parameters")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"precision": "fp16-mixed"}, "--precision fp16-mixed: with engine megatron and optimizer muon"),
        ({"precision": "fp32"}, "--precision fp32"),
        ({"zero": 1, "shard_group": 2, "gpus": 4}, "--shard-group 2: Megatron's dist_muon has one instance"),
        ({"optimizer": "lion"}, "--optimizer lion: with engine megatron is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(GPT, **{"engine": "megatron", "optimizer": "muon", "seq_len": 32, **more})
    assert str(error.value).startswith(named)


def test_arguments_of_megatron() -> None:
    model = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 --bf16"
    )
    for text, zero in (("muon", 0), ("dist_muon", 1), ("muon --use-distributed-optimizer", 1)):
        report = memcalc.estimate(megatron_args=f"{model} --optimizer {text}", gpus=4)
        assert (report.setup.optimizer, report.setup.zero) == ("muon", zero)
