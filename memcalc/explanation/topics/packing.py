"""Packing: several sequences in a row, without padding."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

MASKS: Final = Rule(
    title=Words("With sdpa every layer keeps a mask of 2·(b·s)² bytes", "使用 sdpa 时每层保存 2·(b·s)² 字节的掩码"),
    formula="2·b·b·s·s·L",
    unit="bytes",
    counts=Words(
        "an additive mask in 16 bits for each pair of a micro-batch's tokens, which are one row; each layer makes its own and "
        "saves it for backward.",
        "一个微批次的 token 合成一行，每对 token 一个 16 位加性掩码；每层各自生成并为反向保存。",
    ),
    leaves_out=Words(
        "the boolean mask that they are made of, one byte a pair, and the repeated keys and values of grouped heads.",
        "用来生成它们的布尔掩码（每对一字节），以及分组头重复后的键和值。",
    ),
    quoted=Quoted(
        {"b": 1, "s": 2048, "L": 32},
        2**28,
        0,
        "transformers, integrations/sdpa_attention.py, masking_utils.py (formula)",
    ),
)
GIVEN: Final = Rule(
    title=Words("The collator gives 12·b·s bytes more", "整理器多提供 12·b·s 字节"),
    formula="12·b·s",
    unit="bytes",
    counts=Words(
        "position_ids of 8 bytes, which begin anew with each sequence, and seq_idx of 4, the number of a token's sequence.",
        "8 字节的 position_ids（每个序列重新从零开始）和 4 字节的 seq_idx（token 所属序列的编号）。",
    ),
    leaves_out=Words(
        "cu_seq_lens, where sequences begin: 8 bytes for each of them.",
        "cu_seq_lens（各序列的起点）：每个序列 8 字节。",
    ),
    quoted=Quoted(
        {"b": 4, "s": 2048}, 98304, 0, "trl/trainer/sft_trainer.py, DataCollatorForLanguageModeling (formula)"
    ),
)
_MASKS: Final = Words("additive masks that all layers save", "所有层保存的加性掩码")
_GIVEN: Final = Words("given beside tokens and labels", "除 token 和标签外提供的内容")
_OF_COLLATOR: Final = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")


def masks(asked: Asked) -> Step:
    """Return the bytes of the masks that layers save."""
    own = [item for item in asked.report.items if item.name.endswith(": additive mask")]
    if not own:
        setup = asked.report.setup
        why = "saves no mask of packed rows, as flash-attn's kernel takes where sequences begin"
        raise InputError(f"--attention {setup.attention}: {why}; allowed: sdpa, with --packing")
    return exact_step(asked, _MASKS, {"masks": sum(item.nbytes for item in own)})


def lengths(asked: Asked) -> Step:
    """Return the bytes that the collator gives for packed rows."""
    own = {item.name: item.nbytes for item in asked.report.items if item.name in _OF_COLLATOR}
    if "seq_idx" not in own:
        raise InputError("--packing: is off, so the collator gives tokens alone; allowed: with --packing")
    return exact_step(asked, _GIVEN, own)


TOPIC: Final = Topic(
    name="packing",
    title=Words("Packing", "序列打包"),
    summary=Words("no padding, and attention within each sequence", "没有填充，注意力只在各序列内部"),
    text=(
        Words(
            "A batch of sequences of different lengths is padded to the longest, and padding is computed like any token. "
            "Packing joins sequences until a row is full. The model must not see one sequence from another: positions begin "
            "anew with each, and attention stays within it.",
            "长度不同的一批序列要填充到最长，而填充部分与普通 token 一样参与计算。打包把序列首尾相接直到填满一行。"
            "模型不能从一个序列看到另一个：每个序列的位置重新开始，注意力只在序列内部。",
        ),
        Words(
            "flash-attn's kernel for variable lengths takes the places where sequences begin, and makes no mask: forward keeps "
            "what it keeps for plain rows. With sdpa the tokens of a whole micro-batch are one row, and a mask for each pair of "
            "them is made in every layer. Then memory and time grow with the square of b·s, not of s.",
            "flash-attn 的变长内核只需各序列的起点，不生成掩码：前向保存的内容与普通的行相同。"
            "使用 sdpa 时，整个微批次的 token 合成一行，每层都为每对 token 生成掩码。"
            "于是显存和时间随 b·s 的平方增长，而不是 s 的平方。",
        ),
        Words(
            "The products of attention grow with the sum of the squares of the lengths; --lengths says which they are.",
            "注意力的计算量随各长度平方之和增长；--lengths 说明有哪些长度。",
        ),
    ),
    cases=(
        Case(
            MASKS,
            masks,
            Words("In another precision the mask has that one's bytes.", "其他精度下掩码按该精度的字节数计算。"),
            {"attention": "sdpa"},
        ),
        Case(GIVEN, lengths, Words("cu_seq_lens are there twice, of 4 bytes.", "cu_seq_lens 有两份，每个 4 字节。")),
    ),
    options={"task": "sft", "packing": True, "precision": "bf16"},
)
