"""The CUDA context: what nvidia-smi shows and torch does not."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

CONTEXT: Final = Rule(
    title=Words("A context takes 0.3 to 1.3 GB", "CUDA 上下文占 0.3 到 1.3 GB"),
    formula="1343·1024·1024",
    unit="bytes",
    counts=Words(
        "the driver's state and the kernels that are loaded: 1343 MiB on a V100, before the first tensor.",
        "驱动状态和已加载的核函数：V100 上 1343 MiB，此时还没有任何张量。",
    ),
    leaves_out=Words(
        "that CUDA 11.7 and later load kernels when they are first called, which leaves 300 to 430 MiB; NCCL's buffers.",
        "CUDA 11.7 起核函数在首次调用时才加载，只剩 300 到 430 MiB；以及 NCCL 的缓冲区。",
    ),
    quoted=Quoted({}, 1343 * 2**20, 0, "transformers 4.49 documentation, Model training anatomy"),
)
_OUTSIDE: Final = Words("rows outside torch's allocator", "torch 分配器之外的各行")


def outside(asked: Asked) -> Step:
    """Return the rows of what nvidia-smi shows that are not torch's."""
    return exact_step(asked, _OUTSIDE, {item.name: item.nbytes for item in asked.report.outside})


TOPIC: Final = Topic(
    name="cuda-context",
    title=Words("allocated, reserved, and what nvidia-smi shows", "allocated、reserved 与 nvidia-smi 显示的显存"),
    summary=Words("the memory that nvidia-smi shows and torch does not", "nvidia-smi 能看到而 torch 看不到的显存"),
    text=(
        Words(
            "torch.cuda.max_memory_allocated counts live blocks, each rounded up to 512 B. max_memory_reserved adds what the "
            "caching allocator holds and does not use: fragmentation. nvidia-smi adds what is outside torch: the CUDA context, "
            "and NCCL's buffers with more than one GPU.",
            "torch.cuda.max_memory_allocated 统计存活的块，每块向上取整到 512 B。max_memory_reserved "
            "再加上缓存分配器持有但未使用的部分，"
            "即碎片。nvidia-smi 还加上 torch 之外的部分：CUDA 上下文，以及多卡时 NCCL 的缓冲区。",
        ),
        Words(
            "`memcalc explain --model NAME` lists these rows of an estimate, from the tensors at the peak to the GPU.",
            "`memcalc explain --model NAME` 会列出一次估算中从峰值张量到整卡显存的各行。",
        ),
    ),
    cases=(
        Case(
            CONTEXT,
            outside,
            Words(
                "The rows are measured ones of newer GPUs and drivers, where kernels are loaded lazily; NCCL comes on top.",
                "这些行是在更新的 GPU 和驱动上测得的，核函数按需加载；NCCL 另计。",
            ),
        ),
    ),
)
