"""ZeRO++: what its second partition costs, and what it leaves to send between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.explanation.exact import STATES, exact_step
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.explanation.step import Step
    from memcalc.explanation.topic import Asked

_PAPER: Final = "Wang et al., ZeRO++, arXiv 2306.10209 (formula)"
_ZERO_3: Final = {"zero": 3, "engine": "deepspeed"}
_ALL: Final = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 8}

SECOND: Final = Rule(
    title=Words("A second partition: 16Φ/n + 2Φ/z", "第二份分片：16Φ/n + 2Φ/z"),
    formula="16·Φ/n + 2·Φ/z",
    unit="bytes",
    counts=Words(
        "ZeRO-3's states over all n GPUs, and the 16-bit weights once more over z GPUs of a node.",
        "ZeRO-3 的状态切在全部 n 张 GPU 上，另有一份 16 位权重切在一个节点的 z 张 GPU 上。",
    ),
    leaves_out=Words(
        "activations, gathered weights, and the buffers of codes and of the reduction.",
        "激活值、收集到的权重，以及量化码和规约的缓冲区。",
    ),
    quoted=Quoted({"Φ": 7.5e9, "n": 64, "z": 8}, 3.75e9, 0, _PAPER),
)
PLAIN: Final = Rule(
    title=Words("ZeRO-3 moves 3Φ 16-bit numbers between nodes", "ZeRO-3 在节点间传输 3Φ 个 16 位数"),
    formula="3·2·Φ",
    unit="bytes",
    counts=Words(
        "the weights gathered for forward and for backward, and the gradients: 3M, M being the weights' bytes.",
        "前向和反向各收集一次权重，再加梯度：共 3M，M 为权重的字节数。",
    ),
    leaves_out=Words("weights that stay gathered between forward and backward.", "前向与反向之间保留的完整权重。"),
    quoted=Quoted({"Φ": 7.5e9}, 45e9, 0, _PAPER),
)
ALL: Final = Rule(
    title=Words("ZeRO++ moves 0.75 of Φ 16-bit numbers between nodes", "ZeRO++ 在节点间只传输 0.75Φ 个 16 位数"),
    formula="(0.5 + 0 + 0.25)·2·Φ",
    unit="bytes",
    counts=Words(
        "forward gathers int8 codes (0.5M), backward gathers inside nodes (0), gradients are int4 codes (0.25M).",
        "前向收集 int8 码 (0.5M)，反向在节点内收集 (0)，梯度为 int4 码 (0.25M)。",
    ),
    leaves_out=Words(
        "scales, weights too small to be codes, and what goes inside nodes.",
        "缩放因子、太小而不量化的权重，以及节点内的传输。",
    ),
    quoted=Quoted({"Φ": 7.5e9}, 11.25e9, 0, _PAPER),
)
_STATES: Final = Words(
    "weights, gradients, optimizer states and the second partition", "权重、梯度、优化器状态和第二份权重分片"
)
_MOVED: Final = Words("moved between nodes, each tensor once", "节点间传输的字节，每个张量计一次")
_COMES_AND_GOES: Final = Words(
    "DeepSpeed makes a second partition when a weight is released for the first time in a step, and frees it after the "
    "update; those of frozen weights stay.",
    "DeepSpeed 在一步中首次释放某个权重时才创建它的第二份分片，更新之后释放；冻结权重的分片一直保留。",
)
_AGAIN: Final = Words(
    "Backward gathers fewer weights than forward: some stay gathered (max_live_parameters, max_reuse_distance).",
    "反向收集的权重少于前向：部分权重被保留 (max_live_parameters、max_reuse_distance)。",
)
_SCALES: Final = Words(
    "Each group of codes has an fp32 scale, and weights of one dimension are reduced in 16 bits. With several micro-batches "
    "only the first gathers over all GPUs.",
    "每组码带一个 fp32 缩放因子，一维权重的梯度仍以 16 位规约。有多个微批次时，只有第一个在全部 GPU 上收集。",
)


def states_and_second(asked: Asked) -> Step:
    """Return the bytes of the model states and of the second partition when the step begins."""
    from memcalc.engines.deepspeed.zero_plus_plus import SECOND_PARTITION

    rows = asked.report.rows_at("step")
    second = sum(row.nbytes for row in rows if row.name == SECOND_PARTITION)
    return exact_step(
        asked, _STATES, {**{name: asked.report.total(name) for name in STATES}, "second partition": second}
    )


def moved_between_nodes(asked: Asked) -> Step:
    """Return the bytes of all tensors that ranks of several nodes share in forward and backward. An all-to-all between nodes
    moves a tensor of each GPU of a node. Raises InputError on one node."""
    from memcalc.hardware.cost import distance, group_of

    setup = asked.report.setup
    if setup.gpus <= setup.gpus_per_node:
        raise InputError(f"--gpus {setup.gpus}: one node sends nothing to others; allowed: more than --gpus-per-node")
    parts: dict[str, int] = {}
    for c in asked.report.collectives:
        nodes = group_of(c.group_size, distance(c, setup), setup.gpus, setup.gpus_per_node).nodes
        if c.phase != "step" and nodes > 1:
            times = setup.gpus_per_node if c.collective == "all_to_all" else 1
            name = f"{c.phase} {c.collective}"
            parts[name] = parts.get(name, 0) + c.payload * times
    return exact_step(asked, _MOVED, parts)


TOPIC: Final = Topic(
    name="zero-plus-plus",
    title=Words("ZeRO++: less to send between nodes", "ZeRO++：减少节点间的传输"),
    summary=Words(
        "what ZeRO++ sends between nodes, and what its second partition costs",
        "ZeRO++ 的节点间通信量与第二份分片的代价",
    ),
    text=(
        Words(
            "ZeRO-3 gathers all weights twice and reduces all gradients over all GPUs, so over the network between nodes. "
            "ZeRO++ has three parts, each a switch of its own. qwZ gathers int8 codes with a scale for every group of up to "
            "8000 weights. hpZ keeps a second partition of the weights inside a node, from which backward gathers. qgZ reduces "
            "gradients in two hops of int4 codes, inside a node and then between nodes.",
            "ZeRO-3 要在全部 GPU 上收集两次权重并规约一次梯度，因而都经过节点间网络。ZeRO++ 有三个相互独立的开关：qwZ 收集 int8 "
            "码，每组至多 8000 个权重共用一个缩放因子；hpZ 在节点内再存一份权重分片，反向从中收集；qgZ 把梯度量化成 int4 "
            "码，先在节点内、再在节点间分两跳规约。",
        ),
        Words(
            "The second partition is bought with memory: it is as large on each GPU as if the weights were sharded over its "
            "group alone.",
            "第二份分片以显存换通信：它在每张 GPU 上的大小相当于权重只切在这一组 GPU 上。",
        ),
    ),
    cases=(
        Case(SECOND, states_and_second, _COMES_AND_GOES, {**_ZERO_3, "zero_hpz_partition_size": 8}),
        Case(PLAIN, moved_between_nodes, _AGAIN, _ZERO_3),
        Case(ALL, moved_between_nodes, _SCALES, {**_ZERO_3, **_ALL}),
    ),
    options={"gpus": 16, "precision": "fp16-mixed"},
)
