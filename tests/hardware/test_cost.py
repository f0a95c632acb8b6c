"""The time of collectives: by hand from cited constants, and what must hold of every one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.hardware.cost import INSIDE, Cost, Group, Link, Unknown, cost, cost_of, distance, group_of, step_time
from memcalc.inputs.gpu import load_gpu
from memcalc.layout.collectives import Collective
from memcalc.setup.setup import Setup

NVLINK = Link("nvlink", 450e9)  # H100 SXM5: 900 GB/s in both directions (datasheet)
CARD = Link("network", 50e9)  # ConnectX-7: 400 Gb/s
MICRO = 1e-6
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def one(kind: Any, size: int, payload: int, calls: int = 1, axis: str = "dp") -> Collective:
    return Collective(axis, kind, "it", "backward", "bf16", size, calls, payload, "")


def setup_of(**options: Any) -> Setup:
    return memcalc.estimate("gpt2", **options).setup


def seconds(kind: str, group: Group, payload: int, between: Link = CARD, calls: int = 1) -> float:
    return cost(one(kind, group.size, payload, calls), group, NVLINK, between if group.nodes > 1 else None).seconds


# --- by hand: base 8.4 µs, a step 3.4 (NVLink), 5.7 (PCIe), 14 (network) (NCCL 2.26, src/graph/tuning.cc, ring, Simple)


def test_an_all_reduce_inside_a_node() -> None:
    """14 steps; 2·7/8 of 1 GB over 450 GB/s."""
    found = cost(one("all_reduce", 8, 10**9), Group(8, 1, 8, 8), NVLINK, None)
    assert found.seconds == pytest.approx((8.4 + 14 * 3.4) * MICRO + 1.75e9 / 450e9, rel=1e-12)
    assert found.link == "nvlink"
    assert found.formula == "1·(8.4 µs + 14·3.4 µs) + 1750000000 B / 450 GB/s"


def test_an_all_gather_of_many_calls() -> None:
    found = cost(one("all_gather", 4, 10**9, calls=10), Group(4, 1, 4, 4), NVLINK, None)
    assert found.seconds == pytest.approx(10 * (8.4 + 3 * 3.4) * MICRO + 0.75e9 / 450e9, rel=1e-12)


def test_a_ring_over_nodes_uses_every_card() -> None:
    """Two nodes of 8: a tree goes up and down through 7 ranks of a node and 1 card; 8 cards have 400 GB/s, less than NVLink's
    450."""
    found = cost(one("all_reduce", 16, 16 * 10**8), Group(16, 2, 8, 8), NVLINK, CARD)
    assert found.seconds == pytest.approx((8.4 + 14 * 3.4 + 2 * 14) * MICRO + 3e9 / 400e9, rel=1e-12)
    assert found.link == "network"
    assert found.formula == "1·(8.4 µs + 14·3.4 µs + 2·14 µs) + 3000000000 B / (8·50 GB/s)"


def test_a_ring_of_one_rank_per_node_has_one_card() -> None:
    found = cost(one("reduce_scatter", 4, 4 * 10**9), Group(4, 4, 1, 1), NVLINK, CARD)
    assert found.seconds == pytest.approx((8.4 + 3 * 14) * MICRO + 3e9 / 50e9, rel=1e-12)


def test_a_fast_network_is_no_faster_than_the_node() -> None:
    found = cost(one("all_gather", 16, 16 * 10**9), Group(16, 2, 8, 8), NVLINK, Link("network", 100e9))
    assert found.seconds == pytest.approx((8.4 + 14 * 3.4 + 14) * MICRO + 15e9 / 450e9, rel=1e-12)
    assert found.formula.endswith("15000000000 B / min(8·100, 450) GB/s")


def test_an_all_to_all_sends_what_leaves_the_node_through_its_own_card() -> None:
    """Of 15/16 that a rank sends, 7/16 stay in its node and 8/16 leave it."""
    found = cost(one("all_to_all", 16, 16 * 10**9), Group(16, 2, 8, 8), NVLINK, CARD)
    assert found.seconds == pytest.approx((8.4 + 7 * 3.4 + 8 * 14) * MICRO + 7e9 / 450e9 + 8e9 / 50e9, rel=1e-12)


def test_a_send() -> None:
    assert seconds("send", Group(2, 1, 2, 2), 10**9) == pytest.approx((8.4 + 3.4) * MICRO + 1 / 450, rel=1e-12)
    assert seconds("send", Group(2, 2, 1, 1), 10**9) == pytest.approx((8.4 + 14) * MICRO + 1 / 50, rel=1e-12)


# --- where groups are: rank order tp-cp-ep-dp-pp


@pytest.mark.parametrize(
    ("size", "apart", "gpus", "group"),
    [
        (8, 1, 64, Group(8, 1, 8, 8)),  # a node
        (4, 1, 64, Group(4, 1, 4, 4)),
        (16, 1, 64, Group(16, 2, 8, 8)),
        (16, 4, 64, Group(16, 8, 2, 2)),  # dp 16 over tp 4: two of its ranks in each of 8 nodes
        (8, 8, 64, Group(8, 8, 1, 1)),
        (2, 32, 64, Group(2, 2, 1, 1)),
        (6, 1, 24, Group(6, 2, 2, 4)),  # ranks 6 to 11
        (12, 1, 24, Group(12, 2, 4, 8)),
        (6, 1, 6, Group(6, 1, 6, 6)),
        (2, 3, 6, Group(2, 1, 2, 2)),
    ],
)
def test_groups_on_nodes_of_8(size: int, apart: int, gpus: int, group: Group) -> None:
    assert group_of(size, apart, gpus, 8) == group


@given(size=st.integers(2, 12), apart=st.integers(1, 12), blocks=st.integers(1, 6), gpus_per_node=st.integers(1, 16))
def test_groups_are_those_that_counting_finds(size: int, apart: int, blocks: int, gpus_per_node: int) -> None:
    """All groups, rank by rank: no node of one has fewer ranks than the worst group has, where groups fill whole strides."""
    gpus = size * apart * blocks
    fewest, nodes = size, 1
    for block in range(blocks):
        for offset in range(apart):
            on = [(block * size * apart + offset + i * apart) // gpus_per_node for i in range(size)]
            fewest, nodes = min(fewest, *(on.count(node) for node in set(on))), max(nodes, len(set(on)))
    found = group_of(size, apart, gpus, gpus_per_node)
    assert (found.nodes == 1) == (nodes == 1)
    if gpus_per_node % apart == 0 or apart >= gpus_per_node:
        assert found.fewest == fewest


@pytest.mark.parametrize(
    ("axis", "kind", "size", "apart"),
    [
        ("tp", "all_reduce", 4, 1),
        ("dp", "all_reduce", 4, 4),
        ("pp", "send", 4, 16),
        ("pp", "all_reduce", 2, 48),  # the tied embedding, first and last stage
        ("pp", "all_reduce", 4, 16),  # a number over all stages
        ("dp", "all_reduce", 64, 1),  # a number over all ranks
        ("tp", "all_reduce", 16, 4),  # one over all slices of all stages
    ],
)
def test_how_far_apart_neighbours_are(axis: str, kind: str, size: int, apart: int) -> None:
    setup = setup_of(gpus=64, tp=4, pp=4, global_batch_size=16)
    assert distance(one(kind, size, 1, axis=axis), setup) == apart


def test_a_number_of_all_ranks_that_share_a_sequence_crosses_nodes_once() -> None:
    """Its group is two axes, of which it is counted for the outer one: neighbours are next to each other."""
    report = memcalc.estimate("llama-2-7b", engine="megatron", gpus=16, tp=4, cp=4, zero=1, seq_len=4096)
    (norm,) = [c for c in report.collectives if c.name == "gradient norm"]
    assert (norm.axis, norm.group_size, distance(norm, report.setup)) == ("cp", 16, 1)


def test_hybrid_sharding_has_its_shards_inside_and_its_replicas_across() -> None:
    setup = setup_of(gpus=64, zero=3, engine="fsdp2", shard_group=8)
    assert distance(one("all_gather", 8, 1), setup) == distance(one("reduce_scatter", 8, 1), setup) == 1
    assert distance(one("all_reduce", 8, 1), setup) == 8


# --- what holds of every collective

groups = st.integers(1, 5).flatmap(
    lambda power: st.integers(0, power).map(
        lambda split: Group(2**power, 2**split, 2 ** (power - split), 2 ** (power - split))
    )
)
payloads = st.integers(0, 2**40)
networks = st.floats(1e9, 1e13).map(lambda rate: Link("network", rate))
kinds = st.sampled_from(KINDS)


@given(kind=kinds, payload=payloads)
def test_alone_there_is_nothing_to_wait_for(kind: str, payload: int) -> None:
    assert seconds(kind, Group(1, 1, 1, 1), payload) == 0


@given(kind=kinds, group=groups, payload=payloads, more=payloads, network=networks)
def test_more_bytes_take_no_less(kind: str, group: Group, payload: int, more: int, network: Link) -> None:
    assert seconds(kind, group, payload, network) <= seconds(kind, group, payload + more, network)
    assert seconds(kind, group, payload + 2**40, network) > seconds(kind, group, payload, network)


@given(kind=kinds, power=st.integers(1, 3), payload=payloads, nodes=st.integers(0, 4), network=networks)
def test_more_ranks_take_no_less(kind: str, power: int, payload: int, nodes: int, network: Link) -> None:
    """In a node, and over more and more nodes that are full of them."""
    small, large = 2 ** (power - 1), 2**power
    inside = [Group(n, 1, n, n) for n in (small, large)]
    across = [Group(n * large, n, large, large) for n in (2**nodes, 2 ** (nodes + 1))]
    for few, many in (inside, across):
        assert seconds(kind, few, payload, network) <= seconds(kind, many, payload, network) * (1 + 1e-12)


@given(kind=kinds, group=groups, payload=payloads, network=networks)
def test_crossing_nodes_is_never_faster(kind: str, group: Group, payload: int, network: Link) -> None:
    """But for an all-reduce's latency: a tree between nodes has fewer steps than a ring of as many ranks in one node."""
    if kind == "all_reduce":
        payload += 2**40
    together = Group(group.size, 1, group.size, group.size)
    assert seconds(kind, together, payload) <= seconds(kind, group, payload, network) * (
        1 + (1e-3 if kind == "all_reduce" else 1e-12)
    )


@given(kind=kinds, group=groups, payload=payloads, calls=st.integers(1, 100))
def test_every_call_waits(kind: str, group: Group, payload: int, calls: int) -> None:
    least = calls * 8.4 * MICRO if group.size > 1 else 0
    assert seconds(kind, group, payload, calls=calls) >= least


# --- reports


def test_what_a_step_takes_is_its_collectives() -> None:
    report = memcalc.estimate("llama-7b", gpus=64, zero=3, engine="fsdp2", gpu="h100-80gb")
    costs = [c for c in report.costs if isinstance(c, Cost)]
    assert len(costs) == len(report.collectives) > 0
    time = step_time(report.collectives, report.costs)
    assert time is not None
    assert time.total == pytest.approx(sum(c.seconds for c in costs))
    assert min(time) > 0
    document = report.to_dict()["communication"]
    assert document["per_step"]["seconds"] == {**time._asdict(), "total": time.total}
    for item, c in zip(document["items"], costs, strict=True):
        assert (item["seconds"], item["link"], item["seconds_formula"]) == (c.seconds, c.link, c.formula)
    for phase in ("exposed", "forward", "backward"):
        own = [item["seconds"] for item in document["items"] if item["overlap"] == phase]
        assert document["per_step"]["seconds"][phase] == pytest.approx(sum(own))


def test_without_a_gpu_there_is_no_time() -> None:
    report = memcalc.estimate("gpt2", gpus=8)
    assert report.costs == []
    document = report.to_dict()["communication"]
    assert document["per_step"]["seconds"] is None
    assert {item["seconds"] for item in document["items"]} == {None}
    assert document["items"][0]["overlap"] == "backward"


def test_one_gpu_communicates_in_no_time() -> None:
    assert memcalc.estimate("gpt2", gpu="h100-80gb").to_dict()["communication"]["per_step"]["seconds"]["total"] == 0


@pytest.mark.parametrize(
    ("gpu", "gpus", "words"),
    [("rtx4090", 16, "give --network-gbps"), ("mi300x", 8, "is not NVIDIA's"), ("mi300x", 16, "is not NVIDIA's")],
)
def test_what_is_not_known_is_said(gpu: str, gpus: int, words: str) -> None:
    report = memcalc.estimate("gpt2", gpus=gpus, gpu=gpu)
    assert all(isinstance(c, Unknown) and words in c.missing for c in report.costs)
    communication = report.to_dict()["communication"]
    assert communication["per_step"]["seconds"] is None
    assert words in communication["items"][0]["seconds_formula"]


def test_a_network_that_is_given() -> None:
    """RTX 4090: PCIe 4.0 x16, 0.7 of 32 GB/s each way; 16 of them in two nodes with 8 cards of 0.94 of 12.5 GB/s. A tree goes
    through 7 ranks of a node and 1 card, up and down."""
    report = memcalc.estimate("gpt2", gpus=16, gpu="rtx4090", network_gbps=100)
    buckets, found = report.collectives[0], report.costs[0]
    assert isinstance(found, Cost)
    latency = buckets.calls * (8.4 + 14 * 5.7 + 2 * 14) * MICRO
    assert found.seconds == pytest.approx(latency + buckets.wire / (INSIDE * 32e9), rel=1e-12)
    assert report.setup.network_gbps == 100


@pytest.mark.parametrize(("gpu", "gbps"), [("h100-80gb", 400), ("a100-40gb", 200), ("b300", 800), ("rtx4090", None)])
def test_the_network_of_nvidias_own_nodes(gpu: str, gbps: int | None) -> None:
    assert setup_of(gpus=16, gpu=gpu).network_gbps == gbps


def test_a_bridge_joins_two() -> None:
    """A40: 0.7 of NVLink's 56.25 GB/s each way between two, PCIe among more."""
    two, four = (setup_of(gpus=n, gpu="a40") for n in (2, 4))
    gpu = load_gpu("a40")
    found = [cost_of(one("all_gather", n, 8 * 10**9), setup, gpu) for n, setup in ((2, two), (4, four))]
    assert [c.link for c in found if isinstance(c, Cost)] == ["nvlink", "pcie"]
    assert isinstance(found[0], Cost)
    assert found[0].seconds == pytest.approx((8.4 + 3.4) * MICRO + 4e9 / (INSIDE * 56.25e9), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"gpus": 8}, {"gradient buckets": "backward", "module buffers": "exposed"}),
        ({"gpus": 8, "zero": 1}, {"updated weights": "exposed"}),
        ({"gpus": 8, "zero": 3}, {"parameters": "forward", "gradient buckets": "backward", "gradient norm": "exposed"}),
        (
            {"gpus": 8, "zero": 3, "engine": "fsdp2"},
            {
                "parameters, layers": "forward",
                "parameters again, layers": "backward",
                "gradients, layers": "backward",
                "parameters, outside the layers": "exposed",
                "gradients, outside the layers": "exposed",
            },
        ),
        (
            {"gpus": 8, "tp": 2, "pp": 2, "global_batch_size": 8},
            {
                "input of mlp.linear_fc1": "exposed",
                "input of mlp.linear_fc1, again": "backward",
                "input gradient of mlp.linear_fc1": "backward",
                "output gradient of mlp.linear_fc2": "exposed",
                "hidden states to the next stage": "exposed",
                "main gradients": "exposed",
            },
        ),
        (
            {"gpus": 8, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 8},
            {"hidden states to the next stage": "forward"},
        ),
    ],
)
def test_what_engines_hide(options: dict[str, Any], labels: dict[str, str]) -> None:
    found = {c.name: c.overlap for c in memcalc.estimate("llama-7b", **options).collectives}
    assert {name: found[name] for name in labels} == labels


@pytest.mark.parametrize(("gpus_per_node", "link"), [(8, "nvlink"), (16, "nvlink"), (4, "network"), (1, "network")])
def test_smaller_nodes_are_crossed_sooner(gpus_per_node: int, link: str) -> None:
    report = memcalc.estimate("gpt2", gpus=8, gpu="h100-80gb", gpus_per_node=gpus_per_node)
    (buckets, *_) = report.costs
    assert isinstance(buckets, Cost)
    assert buckets.link == link


def test_a_pipeline_of_one_gpu_stages_stays_in_its_node() -> None:
    inside, across = (
        memcalc.estimate("gpt2", gpus=gpus, pp=4, gpu="h100-80gb", global_batch_size=gpus) for gpus in (4, 16)
    )
    links = [
        {cost.link for c, cost in zip(report.collectives, report.costs, strict=True)
         if c.collective == "send" and isinstance(cost, Cost)}
        for report in (inside, across)
    ]  # fmt: skip
    assert links == [{"nvlink"}, {"network"}]
