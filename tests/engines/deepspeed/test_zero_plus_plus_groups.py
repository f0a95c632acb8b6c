"""Where ZeRO++'s collectives go, what the paper says they send, and setups that are refused."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.engines.deepspeed.quantizer import scales_of
from memcalc.errors import InputError
from memcalc.hardware.cost import path_of
from memcalc.inputs.gpu import load_gpu
from memcalc.layout.collectives import Collective

ZERO_3: dict[str, Any] = {"engine": "deepspeed", "zero": 3, "gpus": 64, "precision": "fp16-mixed", "gpu": "a100-80gb"}
ALL = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 8}
ANEW = {"max_reuse_distance": 0, "max_live_parameters": 0}
"""Nothing stays gathered between forward and backward, as in the paper."""


def nodes_of(collective: Collective, report: memcalc.Report) -> int:
    path = path_of(collective, report.setup, load_gpu("a100-80gb"))
    return path.group.nodes  # type: ignore[union-attr]


def test_groups_and_nodes() -> None:
    """A second partition and the first hop stay on a node; gathers from the first partition and the second hop do not."""
    report = memcalc.estimate("llama-7b", **ZERO_3, **ALL)
    found = {(c.phase, c.collective, c.group_size): nodes_of(c, report) for c in report.collectives}
    assert found["forward", "all_gather", 64] == 8
    assert found["backward", "all_gather", 8] == 1
    assert {nodes_of(c, report) for c in report.collectives if c.name.startswith("gradients, inside")} == {1}
    assert {nodes_of(c, report) for c in report.collectives if c.name.startswith("gradients, between")} == {8}
    assert not any(phase == "backward" and kind == "all_gather" and n == 64 for phase, kind, n in found)


def test_a_second_partition_may_span_nodes() -> None:
    report = memcalc.estimate("llama-7b", **ZERO_3, zero_hpz_partition_size=16)
    assert {nodes_of(c, report) for c in report.collectives if c.group_size == 16} == {2}


def test_time_is_less_where_nodes_are_far_apart() -> None:
    """Over a slow network what stays inside nodes, or is small, is faster."""
    slow = ZERO_3 | {"gpu": "a100-80gb", "network_gbps": 10}
    plain = memcalc.estimate("llama-7b", **slow)
    for part in (
        {"zero_hpz_partition_size": 8},
        {"zero_quantized_weights": True},
        {"zero_quantized_gradients": True},
        ALL,
    ):
        seconds = [sum(c.seconds for c in r.costs) for r in (plain, memcalc.estimate("llama-7b", **slow, **part))]  # type: ignore[union-attr]
        assert seconds[1] < seconds[0]


def between_nodes(report: memcalc.Report, name: str = "") -> float:
    """The bytes between nodes over the weights' 16-bit bytes, as the paper counts them: of a collective over nodes its
    payload, and of an all-to-all between them what all GPUs of a node have to send. Scales count."""
    size = 2 * report.model.num_parameters
    sent = 0
    for c in report.collectives:
        if c.phase != "step" and name in c.name and nodes_of(c, report) > 1:
            sent += c.payload * (report.setup.gpus_per_node if c.collective == "all_to_all" else 1)
    return sent / size


def test_volume_of_the_paper() -> None:
    """Wang et al. 2023, arXiv 2306.10209: between nodes ZeRO-3 sends 3M, and with all of ZeRO++ 0.75M: 0.5M in forward, 0 in
    backward, 0.25M for gradients (M: the bytes of the 16-bit weights). To the last digit: scales and small weights are below
    it."""
    plain = memcalc.estimate("llama-7b", **ZERO_3, **ANEW)
    assert between_nodes(plain) == pytest.approx(3, abs=0.005)
    for part, volume in (
        ({"zero_quantized_weights": True}, 2.0),
        ({"zero_hpz_partition_size": 8}, 2.0),
        ({"zero_quantized_gradients": True}, 2.25),
        (ALL, 0.75),
    ):
        assert between_nodes(memcalc.estimate("llama-7b", **ZERO_3, **ANEW, **part)) == pytest.approx(volume, abs=0.005)


def test_memory_of_the_paper() -> None:
    """Wang et al. 2023: a second partition is 2Ψ/N bytes of 16-bit weights on each of a group's N GPUs."""
    for ranks in (2, 8, 16):
        report = memcalc.estimate("llama-7b", **ZERO_3, zero_hpz_partition_size=ranks)
        (row,) = [row for row in report.rows_at("step") if "second partition" in row.name]
        assert row.nbytes == 2 * report.model.num_parameters // ranks


def test_second_partitions_come_one_by_one_and_stay_for_the_step() -> None:
    plain = memcalc.estimate("llama-7b", **ZERO_3)
    second = memcalc.estimate("llama-7b", **ZERO_3, zero_hpz_partition_size=8)
    assert second.phases["step"] - plain.phases["step"] == 2 * plain.model.num_parameters // 8
    assert plain.phases["forward"] < second.phases["forward"]


@pytest.mark.parametrize("shards", [8, 16])
def test_mics_is_hybrid_sharding(shards: int) -> None:
    """Zhang et al. 2022 (MiCS, arXiv 2205.00119): states over p GPUs, gathers and the reduce-scatter among these, and an
    all-reduce of each GPU's part among the n/p replicas. DeepSpeed 0.19 has no MiCS; FSDP2 shards and replicates so."""
    setup = {"engine": "fsdp2", "zero": 3, "gpus": 64, "precision": "bf16", "gpu": "a100-80gb", "shard_group": shards}
    report = memcalc.estimate("llama-7b", **setup)
    size = 2 * report.model.num_parameters
    assert report.total("parameters") == size // shards
    sent = {c.collective: c for c in report.collectives if c.phase == "backward" and c.axis == "dp"}
    assert sent["reduce_scatter"].group_size == sent["all_gather"].group_size == shards
    assert sent["all_reduce"].group_size == 64 // shards
    assert sent["all_reduce"].payload * shards == sent["reduce_scatter"].payload
    assert [nodes_of(sent[kind], report) for kind in ("reduce_scatter", "all_reduce")] == [shards // 8, 64 // shards]


@pytest.mark.parametrize(("elements", "groups"), [(8, 1), (8000, 1), (8008, 7), (65536, 16), (16 * 7919, 7919)])
def test_scales(elements: int, groups: int) -> None:
    """Against the loops of CUDAQuantizer.quantize."""
    assert scales_of(elements) == groups == by_loops(elements)


def by_loops(elements: int) -> int:
    import torch

    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    asked: list[int] = []

    class Kernels:
        Symmetric = 0

        @staticmethod
        def quantize(values: torch.Tensor, groups: int, bits: int, kind: int) -> None:
            asked.append(groups)

    own: Any = CUDAQuantizer.__new__(CUDAQuantizer)
    own.quantizer_cuda_module, own.group_size_cache = Kernels, {}
    own.quantize(torch.empty(elements, dtype=torch.float16))
    return asked[0]


@pytest.mark.parametrize("elements", range(8, 30_000, 1016))
def test_scales_of_any_multiple_of_eight(elements: int) -> None:
    assert scales_of(elements) == by_loops(elements)


@pytest.mark.parametrize("elements", [1, 4, 12, 8004])
def test_what_deepspeed_asserts_is_refused(elements: int) -> None:
    with pytest.raises(InputError, match="quantises multiples of 8"):
        scales_of(elements)
    with pytest.raises(AssertionError):
        by_loops(elements)


@pytest.mark.parametrize(
    "part", [{"zero_quantized_weights": True}, {"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 2}]
)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"zero": 2}, "--zero 3"),
        ({"engine": "fsdp2"}, "--engine deepspeed"),
        ({"gpus": 1}, "2 or more"),
        ({"cp": 2}, "--cp"),
        ({"offload_optimizer": "cpu"}, "--offload-optimizer"),
        ({"recompute": "op"}, "--recompute"),
        ({"task": "dpo"}, "--task"),
    ],
)
def test_combinations_that_are_not_modelled(part: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as raised:
        memcalc.estimate("llama-7b", **(ZERO_3 | part | more))
    assert "\n" not in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_hpz_partition_size": 7}, "--zero-hpz-partition-size 7: does not divide 64 GPUs; allowed: 1, 2, 4"),
        ({"zero_hpz_partition_size": 128}, "does not divide 64 GPUs"),
        ({"zero_hpz_partition_size": 0}, "allowed: a whole number from 1"),
        ({"zero_quantized_gradients": True, "precision": "fp32"}, "reads 16-bit gradients"),
        ({"zero_quantized_gradients": True, "gpus": 12}, "not a multiple of 8"),
        ({"zero_quantized_weights": True, "gpus": 4096, "param_persistence_threshold": 0}, "quantises multiples of 8"),
    ],
)
def test_values_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as raised:
        memcalc.estimate("llama-7b", **(ZERO_3 | options)).to_dict()
    assert "\n" not in str(raised.value)
    assert words in str(raised.value)


def test_a_bare_number_of_parameters_has_no_collectives() -> None:
    with pytest.raises(InputError, match="--params"):
        memcalc.estimate(params="7B", **ZERO_3, zero_hpz_partition_size=8)


@pytest.mark.parametrize("gpu", [None, "a100-80gb"])
def test_the_document_and_a_layers_share(gpu: str | None) -> None:
    """The bytes of all layers' shares are those of their collectives, without the embeddings'."""
    report = memcalc.estimate("llama-7b", **(ZERO_3 | ALL | {"gpu": gpu, "gpus": 16}))
    document = report.to_dict()
    assert {item["dtype"] for item in document["communication"]["items"]} >= {"int8", "fp32", "fp16"}
    whole = sum(c.payload for c in report.collectives if c.shares is not None)
    layers = report.model.layers * document["communication"]["per_layer"]["payload"]
    assert 0.9 * whole < layers < whole
