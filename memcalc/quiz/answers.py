"""A typed answer: a number with a unit, in English or Chinese, with full-width digits or not."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import Final, NamedTuple

from memcalc.explanation.words import Words
from memcalc.quiz.question import Quantity


class NotANumber(ValueError):
    """Raised for an answer that cannot be read. It does not count as wrong: the question is asked again."""

    def __init__(self, words: Words) -> None:
        super().__init__(words.en)
        self.words = words


class Typed(NamedTuple):
    """A number as typed, its unit, and what both are in the unit of the question's answer."""

    number: Fraction
    unit: str
    value: Fraction


MOST: Final = 200
"""Characters of an answer."""
_MOST_EXPONENT: Final = 40
_SUPERSCRIPTS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_POWER: Final = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_FRACTION_AFTER_A_DIGIT: Final = re.compile(r"(?<=\d)(?=[¼½¾⅐-⅞])")
_ASCII: Final = str.maketrans("\u2212\u2044’", "-/'")
"""The minus sign, the slash of fractions and the apostrophe."""
_NUMBER: Final = re.compile(
    r"""(?P<sign>[-+]?)
    (?:(?P<mantissa>\d{1,3}(?:[, _']\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)
       (?:[eE](?P<exponent>[-+]?\d+)|\s*[x×*·]\s*(?P<base>10|2)\s*(?:\^|\*\*)\s*(?P<power>[-+]?\d+))?
       (?:\s*/\s*(?P<below>\d+(?:\.\d+)?))?
    )""",
    re.VERBOSE,
)
_POWER_ALONE: Final = re.compile(r"(?P<base>10|2)\s*(?:\^|\*\*)\s*(?P<power>[-+]?\d+)")
_ABOUT: Final = re.compile(r"^(?:=|~|≈|∼|about|approx(?:imately)?\.?|ca\.?|大约|约为|约|等于)\s*", re.IGNORECASE)

_SIZES: Final[Mapping[str, int]] = {
    "b": 1, "byte": 1, "bytes": 1, "字节": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
    "kilobytes": 10**3, "megabytes": 10**6, "gigabytes": 10**9, "terabytes": 10**12,
    "kibibytes": 2**10, "mebibytes": 2**20, "gibibytes": 2**30, "tebibytes": 2**40,
}  # fmt: skip
_FLOPS: Final[Mapping[str, int]] = {
    "": 1, "kflop": 10**3, "mflop": 10**6, "gflop": 10**9, "tflop": 10**12, "pflop": 10**15, "eflop": 10**18, "flop": 1,
}  # fmt: skip
_SCALES: Final[Mapping[str, int]] = {
    "": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12,
    "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15,
    "mn": 10**6, "bn": 10**9, "tn": 10**12, "quintillion": 10**18,
    "千": 10**3, "万": 10**4, "百万": 10**6, "千万": 10**7, "亿": 10**8, "十亿": 10**9, "百亿": 10**10, "千亿": 10**11,
    "万亿": 10**12, "兆": 10**12, "亿亿": 10**16,
}  # fmt: skip
_RATIOS: Final[Mapping[str, Fraction]] = {
    "": Fraction(1), "x": Fraction(1), "×": Fraction(1), "times": Fraction(1), "time": Fraction(1), "倍": Fraction(1),
    "fold": Fraction(1), "-fold": Fraction(1),
    "%": Fraction(1, 100), "percent": Fraction(1, 100), "per cent": Fraction(1, 100),
}  # fmt: skip
_NOUNS: Final[Mapping[Quantity, tuple[str, ...]]] = {
    "parameters": ("parameters", "parameter", "params", "个参数", "参数", "个"),
    "elements": ("elements", "element", "个元素", "元素", "个"),
    "gpus": ("gpus", "gpu", "张gpu", "张 gpu", "块gpu", "块 gpu", "个gpu", "个 gpu", "张", "块", "卡", "张卡", "个"),
    "micro-batches": ("micro-batches", "micro-batch", "microbatches", "个微批次", "微批次", "个"),
}
_YES: Final = ("yes", "y", "true", "fits", "it fits", "是", "能", "可以", "放得下", "对")
_NO: Final = ("no", "n", "false", "does not fit", "不", "否", "不能", "不可以", "放不下", "不是")
_BITS: Final = re.compile(r"[kMGTP]b|[kmgtp]?bits?|[kmgtp]ibits?", re.ASCII)
_BARE_SIZES: Final = frozenset("kmgtp")

EMPTY: Final = Words("There is no number in it.", "里面没有数字。")
TOO_LONG: Final = Words(f"An answer has at most {MOST} characters.", f"答案最多 {MOST} 个字符。")
YES_OR_NO: Final = Words("Answer yes or no.", "请回答“是”或“否”（yes 或 no）。")
NO_UNIT: Final = Words(
    "A size needs a unit: B, MB, GB, TB (powers of 10) or MiB, GiB, TiB (powers of 2).",
    "大小需要单位：B、MB、GB、TB（10 的幂）或 MiB、GiB、TiB（2 的幂）。",
)
WHICH_BASE: Final = Words(
    "The letter alone may be a power of 10 or of 2: write GB (10^9) or GiB (2^30), MB or MiB, TB or TiB.",
    "只写字母无法区分 10 的幂和 2 的幂：请写 GB (10^9) 或 GiB (2^30)，MB 或 MiB，TB 或 TiB。",
)
BITS: Final = Words(
    "That is a unit of bits. Write a unit of bytes, as GB or GiB.", "这是比特的单位。请写字节的单位，如 GB 或 GiB。"
)
OTHER_UNIT: Final = Words("The unit is not one of those that the question is about.", "单位与题目不符。")
COMMA: Final = Words(
    "A comma separates thousands (1,234), and a point decimals (1.5).", "逗号用作千位分隔（1,234），小数用点（1.5）。"
)
TOO_LARGE: Final = Words("The exponent is too large.", "指数太大。")


def typed(text: str, quantity: Quantity) -> Typed | bool:
    """Return the number that a line has, in the unit of the quantity; True or False for a yes or no. NotANumber where it cannot
    be read."""
    if len(text) > MOST:
        raise NotANumber(TOO_LONG)
    plain = _plain(text)
    if quantity == "truth":
        return _yes_or_no(plain)
    number, rest = _number(_ABOUT.sub("", plain))
    unit = rest.strip().rstrip(".。!").strip()
    return Typed(number, unit, number * _factor(unit, quantity))


def unit_sizes(quantity: Quantity) -> Mapping[str, int]:
    """Return the sizes of the units that a quantity has by their lower-case names; nothing where it has none."""
    return _SIZES if quantity == "bytes" else _FLOPS if quantity == "flop" else {}


def _plain(text: str) -> str:
    """Return text with half-width characters and powers written with ^."""
    powers = _POWER.sub(lambda power: "^" + power[0].translate(_SUPERSCRIPTS), text)
    apart = _FRACTION_AFTER_A_DIGIT.sub(" ", powers)
    normal = unicodedata.normalize("NFKC", apart).translate(_ASCII)
    return " ".join(normal.split())


def _yes_or_no(plain: str) -> bool:
    word = plain.lower().rstrip(".!。")
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise NotANumber(YES_OR_NO)


def _number(plain: str) -> tuple[Fraction, str]:
    """Return the number at the beginning of a text, and the rest of the text."""
    alone = _POWER_ALONE.match(plain)
    if alone is not None:
        return _to_the_power(alone["base"], alone["power"]), plain[alone.end() :]
    found = _NUMBER.match(plain)
    if found is None:
        raise NotANumber(EMPTY)
    rest = plain[found.end() :]
    if re.match(r"[,'_]\s?\d", rest):
        raise NotANumber(COMMA)
    if re.match(r"\s?[\d.]", rest):
        raise NotANumber(OTHER_UNIT)
    number = Fraction(re.sub(r"[, _']", "", found["mantissa"]).rstrip("."))
    if found["exponent"]:
        number *= _to_the_power("10", found["exponent"])
    if found["base"]:
        number *= _to_the_power(found["base"], found["power"])
    if found["below"]:
        below = Fraction(found["below"])
        if not below:
            raise NotANumber(EMPTY)
        number /= below
    return (-number if found["sign"] == "-" else number), rest


def _to_the_power(base: str, power: str) -> Fraction:
    if len(power) > 4 or abs(int(power)) > (_MOST_EXPONENT if base == "10" else 3 * _MOST_EXPONENT):
        raise NotANumber(TOO_LARGE)
    return Fraction(int(base)) ** int(power)


def _factor(unit: str, quantity: Quantity) -> Fraction:
    lower = unit.lower()
    if quantity == "ratio":
        return _known(_RATIOS, lower)
    if quantity == "bytes":
        return _of_bytes(unit, lower)
    if quantity == "flop":
        return _of_flops(lower)
    return _of_count(lower, quantity)


def _of_bytes(unit: str, lower: str) -> Fraction:
    if not lower:
        raise NotANumber(NO_UNIT)
    if lower in _BARE_SIZES:
        raise NotANumber(WHICH_BASE)
    if _BITS.fullmatch(unit) or (_BITS.fullmatch(lower) and lower not in _SIZES):
        raise NotANumber(BITS)
    if lower in _SIZES:
        return Fraction(_SIZES[lower])
    for noun in ("bytes", "byte", "字节", "b"):
        scale = lower.removesuffix(noun).strip()
        if lower.endswith(noun) and scale in _SCALES:
            return Fraction(_SCALES[scale])
    if lower in _SCALES:
        return Fraction(_SCALES[lower])
    raise NotANumber(NO_UNIT)


def _of_flops(lower: str) -> Fraction:
    singular = lower.replace("flops", "flop")
    if singular in _FLOPS:
        return Fraction(_FLOPS[singular])
    return _known(_SCALES, singular.removesuffix("flop").strip())


def _of_count(lower: str, quantity: Quantity) -> Fraction:
    noun = max((noun for noun in _NOUNS.get(quantity, ()) if lower.endswith(noun)), key=len, default="")
    return _known(_SCALES, lower[: len(lower) - len(noun)].strip())


def _known(factors: Mapping[str, int] | Mapping[str, Fraction], unit: str) -> Fraction:
    if unit not in factors:
        raise NotANumber(OTHER_UNIT)
    return Fraction(factors[unit])
