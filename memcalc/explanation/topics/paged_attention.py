"""Paged attention: a cache in blocks, and the share of the GPU that a serving engine takes for it."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import bf16
from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words
from memcalc.inference.options import Asked as Options
from memcalc.inference.refusals import refuse_model
from memcalc.inference.serving.vllm import Batching, layers_of, planned, specs, workload

CACHED: Final = Rule(
    title=Words("A sequence takes 4·L·h bytes for each of its tokens", "每个序列的每个 token 占 4·L·h 字节"),
    formula="4·L·h·s",
    unit="bytes",
    counts=Words(
        "keys and values of the hidden size in every layer, in 16 bits, for one sequence of full length.",
        "单个满长序列在每层的键和值（隐藏维度大小，16 位）。",
    ),
    leaves_out=Words(
        "blocks: the last one is not full, and layers with windows or states have blocks of their own.",
        "块：最后一块未满；带窗口或状态的层有各自的块。",
    ),
    quoted=Quoted(
        {"L": 40, "h": 5120, "s": 1},
        800 * 2**10,
        0,
        "a token of OPT-13B, Kwon et al., PagedAttention, arXiv 2309.06180, section 3 (formula)",
    ),
)
_BATCH: Final = Batching(8192, 1024)
_BLOCKS: Final = Words(
    "blocks of one such sequence in vLLM, by group of layers", "vLLM 中一个这样的序列所占的块（按层分组）"
)


def blocks(asked: Asked) -> Step:
    """Return the bytes of the blocks that one sequence takes in vLLM, by group of layers."""
    model, length = asked.report.model, asked.report.setup.seq_len or 0
    refuse_model(model, Options())
    work = workload(model, length, _BATCH)
    plan = planned(specs(model, layers_of(model, "vllm"), bf16, bf16), 0, work)
    parts: dict[str, int] = {}
    for i, group in enumerate(plan.groups):
        name = f"group {i}: {len(group.layers)} layers, {group.spec.block_size} tokens a block"
        parts[name] = group.blocks(work) * plan.bytes_per_block
    if not parts:
        raise InputError(f"--model {model.name}: no layer caches anything")
    return exact_step(asked, _BLOCKS, parts)


TOPIC: Final = Topic(
    name="paged-attention",
    title=Words("Serving: a cache in blocks, and its share of the GPU", "推理服务：分块缓存与显存占比"),
    summary=Words("blocks of a paged cache, and how many sequences fit", "分页缓存的块，以及能容纳多少序列"),
    text=(
        Words(
            "A cache that is one tensor for each sequence has to be as long as the sequence may become. vLLM keeps blocks of "
            "16 tokens instead, and a table of blocks for each sequence: only the last block is partly empty. All layers of one "
            "kind share a table, so a block is one page of each of them. Layers with windows or recurrent states are groups of "
            "their own in the same pool, with pages made equal.",
            "如果每个序列的缓存是一个张量，它必须按可能的最大长度分配。vLLM 改用每块 16 个 token 的块，"
            "并为每个序列维护一张块表："
            "只有最后一块未满。同类的层共用一张表，因此一块包含每层的一页。带窗口或循环状态的层在同一个池中各成一组，页大小被统一。",
        ),
        Words(
            "vLLM takes a share of the GPU (gpu_memory_utilization). From it go the weights, the peak of a forward of "
            "max_num_batched_tokens tokens, and what is outside torch; the rest is blocks. SGLang's mem_fraction_static is "
            "another share: of weights and cache alone. `memcalc infer --engine vllm --gpu NAME` does both sums.",
            "vLLM 占用 GPU 的一定比例（gpu_memory_utilization）：减去权重、一次 max_num_batched_tokens 个 token 的前向峰值和 "
            "torch 之外的部分，其余都是块。SGLang 的 mem_fraction_static 是另一种比例：只含权重和缓存。"
            "`memcalc infer --engine vllm --gpu NAME` 会给出两者的计算。",
        ),
        Words(
            "CUDA graphs of decode steps take memory too. vLLM captures some of them when it starts, and subtracts what it has "
            "measured; no rule gives their bytes, only a lower bound. SGLang leaves room by a rule of its own: 2 MiB for each "
            "sequence of the largest captured decode step, 8 MiB for each captured size of a prefill.",
            "解码步的 CUDA graph 也占显存。vLLM 启动时先捕获其中几个，再扣除测得的大小；没有公式能给出其字节数，只知道下限。"
            "SGLang 按自己的规则预留：最大的解码图每个序列 2 MiB，预填充每个捕获的长度 8 MiB。",
        ),
    ),
    cases=(
        Case(
            CACHED,
            blocks,
            Words(
                "Fewer key-value heads divide it; a window bounds it by the window and what is under way; a block is whole.",
                "较少的 KV 头使其成倍减小；窗口使其不超过窗口加在途的 token；块总是整块分配。",
            ),
        ),
    ),
    options={"precision": "bf16"},
)
