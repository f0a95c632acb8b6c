"""The key/value cache: what generation keeps of every token."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words
from memcalc.inference.infer import infer

if TYPE_CHECKING:
    from memcalc.inference.report import Inferred

WIDE: Final = Rule(
    title=Words("Keys and values: 4·b·L·h bytes for each token", "键和值：每个 token 占 4·b·L·h 字节"),
    formula="4·b·L·h·s",
    unit="bytes",
    counts=Words(
        "a key and a value of the hidden size in every layer, in 16 bits.", "每层各一个隐藏维度大小的键和值，16 位。"
    ),
    leaves_out=Words(
        "that heads can share keys and values, windows, latents, and layers without attention.",
        "多个头共享键和值、滑动窗口、潜变量压缩，以及没有注意力的层。",
    ),
    quoted=Quoted(
        {"b": 512, "L": 96, "h": 12288, "s": 544},
        1.2 * 2**40,
        0.01 * 2**40,
        "OPT-175B with 512 + 32 tokens, Sheng et al., FlexGen, arXiv 2303.06865, section 3",
    ),
)
GROUPED: Final = Rule(
    title=Words(
        "Keys and values of grouped heads: 4·b·L·k·d bytes for each token",
        "分组查询注意力：每个 token 占 4·b·L·k·d 字节",
    ),
    formula="4·b·L·k·d·s",
    unit="bytes",
    counts=Words(
        "a key and a value of each key-value head in every layer, in 16 bits.", "每层每个 KV 头各一个键和值，16 位。"
    ),
    leaves_out=Words(
        "windows, latents, and what the run takes besides.", "滑动窗口、潜变量压缩，以及运行所需的其他显存。"
    ),
    quoted=Quoted(
        {"b": 1, "L": 32, "k": 8, "d": 128, "s": 8192},
        2**30,
        0,
        "a page of vLLM, vllm/v1/kv_cache_interface.py: 2·block·heads·head_dim·itemsize (formula)",
    ),
)
ALL: Final = Rule(
    title=Words("Inference takes 1.2 times the weights", "推理显存约为权重的 1.2 倍"),
    formula="12·2·Φ/10",
    unit="bytes",
    counts=Words("16-bit weights and a fifth of them for everything else.", "16 位权重，其余一切按权重的五分之一计。"),
    leaves_out=Words(
        "batch and length, on which caches and temporaries depend: a long prompt or a large batch takes many times more.",
        "批次和长度：缓存和临时张量取决于它们，长提示或大批次会大出许多倍。",
    ),
    quoted=Quoted({"Φ": 7 * 10**9}, 168 * 10**8, 0, "EleutherAI, Transformer Math 101, blog.eleuther.ai (formula)"),
)
_CACHE: Final = Words(
    "keys and values after a prompt, by transformers' DynamicCache",
    "提示处理完后的键和值（transformers 的 DynamicCache）",
)
_TOTAL: Final = Words("the peak of the prefill of one prompt", "一次预填充的峰值")


def cached(asked: Asked) -> Step:
    """Return the bytes of the cache after the prompts, by the rows of each kind."""
    report = _after_prompt(asked)
    parts: Counter[str] = Counter()
    for item in report.items:
        if item.component in ("kv_cache", "state_cache"):
            parts[item.name.rpartition(": ")[2]] += item.nbytes
    return exact_step(asked, _CACHE, dict(parts))


def whole(asked: Asked) -> Step:
    """Return the bytes at the peak of the prefill, or of weights and caches if the prefill is not modelled."""
    report = _after_prompt(asked)
    parts: Counter[str] = Counter()
    for item in report.items:
        parts[item.component] += item.at_peak
    return exact_step(asked, _TOTAL, {name: nbytes for name, nbytes in parts.items() if nbytes})


def _after_prompt(asked: Asked) -> Inferred:
    setup = asked.report.setup
    return infer(asked.report.model, batch_size=setup.micro_batch_size, prompt_len=setup.seq_len, new_tokens=0)


_DIFFERS: Final = Words(
    "Heads that share keys and values divide it; a latent (DeepSeek) replaces it by its rank and the rotary part; layers with a "
    "window keep the last tokens only, but transformers holds the whole prompt until the next token comes.",
    "共享键和值的头使其成倍减小；潜变量（DeepSeek）只缓存其秩和旋转部分；带窗口的层只保留最近的 token，"
    "但在下一个 token 到来之前 transformers 仍持有整个提示。",
)
_MORE: Final = Words(
    "The rest are caches, logits of the last token and the temporaries of one layer; none of them depends on the weights' size.",
    "其余部分是缓存、最后一个 token 的 logits 和单层的临时张量，均不取决于权重大小。",
)

TOPIC: Final = Topic(
    name="kv-cache",
    title=Words("The memory of inference", "推理的显存"),
    summary=Words(
        "what generation keeps of every token, and what else it takes", "生成时每个 token 保留什么，以及还需要什么"
    ),
    text=(
        Words(
            "Attention needs the keys and values of all earlier tokens. They do not change, so they are kept: two tensors "
            "(batch, key-value heads, tokens, head size) in every layer. A layer with a state-space mixer keeps a state of "
            "fixed size instead, and a convolution's last inputs.",
            "注意力需要此前所有 token 的键和值。它们不再变化，因此被保存下来：每层两个张量（批次、KV 头数、token 数、头维度）。"
            "状态空间混合层则只保留固定大小的状态和卷积最近的输入。",
        ),
        Words(
            "The prefill runs all tokens of the prompt at once: its temporaries grow with the prompt. A decode step runs one "
            "token of each sequence. transformers' dynamic cache makes a longer copy of a layer's keys and values in every "
            "step, so the old and the new ones are there together for a moment, one layer at a time. `memcalc infer` runs both.",
            "预填充一次处理提示的所有 token，临时张量随提示增长；解码步每个序列只处理一个 token。transformers 的动态缓存"
            "每步都把一层的键和值复制成更长的张量，因此新旧张量会短暂并存，一次一层。`memcalc infer` 两者都会运行。",
        ),
        Words(
            "A static cache (`memcalc infer --cache static`) has its greatest length from the first forward on. No step copies "
            "it, but attention reads all of it, empty places too, and each decode step makes a mask.",
            "静态缓存（`memcalc infer --cache static`）从第一次前向起就占满最大长度：不再逐步复制，但注意力会读取全部长度"
            "（包括空位），每个解码步还要生成掩码。",
        ),
    ),
    cases=(
        Case(WIDE, cached, _DIFFERS),
        Case(GROUPED, cached, _DIFFERS),
        Case(ALL, whole, _MORE),
    ),
    options={"precision": "bf16"},
)
