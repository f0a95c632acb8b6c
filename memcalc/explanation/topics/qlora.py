"""QLoRA over shards: codes that are shared, scales that are not, and what ZeRO-3's graph keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.explanation.step import Step
    from memcalc.explanation.topic import Asked

_PAPER: Final = "Dettmers et al., QLoRA, arXiv 2305.14314, section 3 (formula)"
_KEEPS: Final = "bitsandbytes/autograd/_functions.py of 0.50, MatMul4Bit (formula)"

CODES: Final = Rule(
    title=Words("Half a byte of codes for a parameter, shared by n GPUs", "每个参数半字节编码，由 n 张 GPU 分担"),
    formula="B/(2·n)",
    unit="bytes",
    counts=Words(
        "4-bit codes of the base, kept as tensors of the weights' dtype, of which each GPU has a part.",
        "底座的 4 位编码，以权重的 dtype 存放，每张 GPU 持有一份。",
    ),
    leaves_out=Words(
        "scales, adapters, and what is not quantised: embeddings, head and norms in 16 bits.",
        "缩放系数、适配器，以及未量化的部分：16 位的词嵌入、输出层和归一化层。",
    ),
    quoted=Quoted({"B": 65 * 10**9, "n": 4}, 8_125_000_000, 0, _PAPER),
)
SCALES: Final = Rule(
    title=Words("A scale of 4 bytes for 64 parameters, on every GPU", "每 64 个参数一个 4 字节缩放系数，每张 GPU 都有"),
    formula="4·B/64",
    unit="bytes",
    counts=Words(
        "fp32 scales. They are attributes of the weight (quant_state) and no parameters, so nobody shards them.",
        "fp32 缩放系数。它们是权重的属性 (quant_state) 而非参数，因此不会被切分。",
    ),
    leaves_out=Words(
        "double quantization, which leaves 0.127 bits for a parameter instead of 0.5, and the tables of codes.",
        "双重量化（每个参数由 0.5 位降到 0.127 位）以及编码表。",
    ),
    quoted=Quoted({"B": 65 * 10**9}, 4_062_500_000, 0, _PAPER),
)
KEPT: Final = Rule(
    title=Words("ZeRO-3 has all codes twice when forward ends", "ZeRO-3 在前向结束时持有两份全部编码"),
    formula="B/2 + B/2",
    unit="bytes",
    counts=Words(
        "codes that were gathered in this forward and in the one before: each graph refers to its own until its loss is gone.",
        "本次前向和上一次前向收集的编码：每个计算图都引用自己的一份，直到其损失被释放。",
    ),
    leaves_out=Words(
        "that a loop which drops the loss earlier, as transformers' Trainer does, has one of the two, and checkpoints that "
        "re-enter have none.",
        "更早丢弃损失的循环（如 transformers 的 Trainer）只有其中一份，重入式检查点则没有。",
    ),
    quoted=Quoted({"B": 65 * 10**9}, 65 * 10**9, 0, _KEEPS),
)
_OF_CODES: Final = Words("codes on a GPU", "一张 GPU 上的编码")
_OF_SCALES: Final = Words("scales and tables on a GPU", "一张 GPU 上的缩放系数和编码表")
_GATHERED: Final = Words("codes that two graphs keep", "两个计算图保留的编码")
_OTHERS: Final = Words(
    "Embeddings, head and norms are parameters of the base too, and are not quantised.",
    "词嵌入、输出层和归一化层也属于底座的参数，但不量化。",
)


def codes(asked: Asked) -> Step:
    """Return the bytes of codes that a GPU holds between steps."""
    return exact_step(asked, _OF_CODES, {"codes": _held(asked, of_codes=True)})


def scales(asked: Asked) -> Step:
    """Return the bytes of what a GPU holds of quantised weights beside their codes."""
    return exact_step(asked, _OF_SCALES, {"scales": _held(asked, of_codes=False)})


def gathered_codes(asked: Asked) -> Step:
    """Return the bytes of gathered codes at the end of forward, at its peak."""
    from memcalc.engines.deepspeed.zero3_codes import KEPT as BEFORE

    before = sum(row.nbytes for row in asked.report.rows_at("forward") if row.name.startswith(BEFORE))
    return exact_step(asked, _GATHERED, {"before": before, "now": before})


def _held(asked: Asked, *, of_codes: bool) -> int:
    weights = {w.name: w.packing for w in asked.report.model.weight_classes if w.packing is not None}
    items = [item for item in asked.report.items if item.component == "parameters"]
    if of_codes:
        return sum(item.nbytes for item in items if item.name in weights)
    return sum(item.nbytes for item in items if item.name.rpartition(".")[0] in weights)


_FSDP2: Final = {"engine": "fsdp2"}
TOPIC: Final = Topic(
    name="qlora",
    title=Words(
        "QLoRA over shards (4-bit bases with FSDP2 and ZeRO-3)", "切分的 QLoRA（FSDP2 与 ZeRO-3 上的 4 位底座）"
    ),
    summary=Words(
        "which parts of a 4-bit base are sharded, and which are not", "4 位底座的哪些部分由各 GPU 分担，哪些不分担"
    ),
    text=(
        Words(
            "bitsandbytes packs two codes a byte. FSDP shards and gathers tensors of floats, so the packed bytes are kept as "
            "numbers of the weights' own dtype (bnb_4bit_quant_storage, here --quantize-storage): four codes in a bf16. Codes "
            "in uint8 are left out by accelerate, and are whole on every GPU. FSDP1 refuses them.",
            "bitsandbytes 每字节存两个编码。FSDP 切分和收集的是浮点张量，因此这些字节以权重自身的 dtype 存放"
            "（bnb_4bit_quant_storage，即 --quantize-storage）：一个 bf16 存四个编码。uint8 编码会被 accelerate 排除在切分之外，"
            "每张 GPU 都有完整的一份；FSDP1 则拒绝它们。",
        ),
        Words(
            "The scales are attributes of the weight and stay whole everywhere. On 8 GPUs they take as much as a GPU's codes. "
            "--double-quant shrinks them to a quarter.",
            "缩放系数是权重的属性，在每张 GPU 上都完整保留。"
            "在 8 张 GPU 上，它们与一张 GPU 的编码一样大；--double-quant 将其缩小到四分之一。",
        ),
        Words(
            "Under ZeRO-3 a product keeps the codes that were gathered for it as an attribute of its node of the graph. "
            "Neither the engine nor a checkpoint frees them, so at the end of forward each GPU has all of them again. FSDP2 "
            "frees the storage itself, and has no such rows.",
            "在 ZeRO-3 下，乘法算子把为它收集的编码作为计算图节点的属性保留。引擎和检查点都不会释放它们，"
            "因此前向结束时每张 GPU 又有了全部编码。FSDP2 直接释放存储，没有这些开销。",
        ),
    ),
    cases=(
        Case(CODES, codes, _OTHERS, _FSDP2),
        Case(SCALES, scales, _OTHERS, _FSDP2),
        Case(KEPT, gathered_codes, _OTHERS, {"engine": "deepspeed"}),
    ),
    options={"gpus": 8, "zero": 3, "quantize": "nf4", "lora_rank": 16, "recompute": "full", "precision": "bf16-mixed"},
)
