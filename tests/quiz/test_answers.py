"""Typed answers: numbers and units in every usual way of writing them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.quiz import answers
from memcalc.quiz.answers import NotANumber, Typed, typed
from memcalc.quiz.question import Quantity


def value(text: str, quantity: Quantity) -> Fraction:
    found = typed(text, quantity)
    assert isinstance(found, Typed)
    return found.value


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("112 GB", 112 * 10**9), ("112GB", 112 * 10**9), ("112 gb", 112 * 10**9), (" 112   GB ", 112 * 10**9),
        ("1.9GiB", Fraction(19, 10) * 2**30), ("1.9 gib", Fraction(19, 10) * 2**30), ("2 TiB", 2**41), ("3 MB", 3_000_000),
        ("3 MiB", 3 * 2**20), ("16 kB", 16_000), ("512 B", 512), ("512 bytes", 512), ("512字节", 512), ("1.5 TB.", 15 * 10**11),
        ("6,738,415,616 B", 6_738_415_616), ("6 738 415 616 B", 6_738_415_616), ("6_738_415_616 B", 6_738_415_616),
        ("6'738'415'616 bytes", 6_738_415_616), ("1.12e11 B", 112 * 10**9), ("1.12E+11 bytes", 112 * 10**9),
        ("1.12 × 10^11 B", 112 * 10**9), ("1.12*10**11 B", 112 * 10**9), ("1.12·10¹¹ B", 112 * 10**9), ("2^30 B", 2**30),
        ("１１２ＧＢ", 112 * 10**9), ("１．９ ＧｉＢ", Fraction(19, 10) * 2**30), ("1120 亿字节", 112 * 10**9),
        ("112 billion bytes", 112 * 10**9), ("112 billion", 112 * 10**9), ("~112 GB", 112 * 10**9), ("约 112 GB", 112 * 10**9),
        ("about 112 GB", 112 * 10**9), ("= 112 GB", 112 * 10**9), ("224/2 GB", 112 * 10**9), ("-1 GB", -(10**9)),
        (".5 GB", 5 * 10**8), ("5. GB", 5 * 10**9), ("112 gigabytes", 112 * 10**9),
    ],
)  # fmt: skip
def test_sizes(text: str, nbytes: Fraction) -> None:
    assert value(text, "bytes") == nbytes


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("2 x", 2), ("2x", 2), ("2×", 2), ("1.5 times", "3/2"), ("1.5 倍", "3/2"), ("1.5倍", "3/2"), ("12.5%", "1/8"),
        ("12.5 ％", "1/8"), ("12.5 percent", "1/8"), ("0.125", "1/8"), ("1/8", "1/8"), ("1 / 8", "1/8"), ("4/3 x", "4/3"),
        ("2-fold", 2), ("150%", "3/2"), ("½", "1/2"),
    ],
)  # fmt: skip
def test_ratios(text: str, ratio: int | str) -> None:
    assert value(text, "ratio") == Fraction(ratio)


@pytest.mark.parametrize(
    ("text", "quantity", "number"),
    [
        ("14", "gpus", 14), ("14 GPUs", "gpus", 14), ("14 张 GPU", "gpus", 14), ("14张", "gpus", 14), ("14 卡", "gpus", 14),
        ("3,072", "gpus", 3072), ("28", "micro-batches", 28), ("28 micro-batches", "micro-batches", 28),
        ("28 个微批次", "micro-batches", 28), ("3.5e9", "parameters", 3_500_000_000), ("3.5B", "parameters", 3_500_000_000),
        ("1.5 million", "elements", 1_500_000), ("1.5 million elements", "elements", 1_500_000),
        ("150 万", "elements", 1_500_000), ("150万个元素", "elements", 1_500_000), ("1.5 亿", "elements", 150_000_000),
        ("1.5 万亿", "parameters", 1_500_000_000_000), ("86 TFLOP", "flop", 86 * 10**12), ("86 TFLOPs", "flop", 86 * 10**12),
        ("8.6e13", "flop", 86 * 10**12), ("86 trillion FLOP", "flop", 86 * 10**12), ("0.086 PFLOP", "flop", 86 * 10**12),
        ("86 万亿 FLOP", "flop", 86 * 10**12),
    ],
)  # fmt: skip
def test_counts(text: str, quantity: Quantity, number: int) -> None:
    assert value(text, quantity) == number


@pytest.mark.parametrize("text", ["yes", "Y", "是", "放得下", "Yes."])
def test_yes(text: str) -> None:
    assert typed(text, "truth") is True


@pytest.mark.parametrize("text", ["no", "N", "否", "放不下", "does not fit"])
def test_no(text: str) -> None:
    assert typed(text, "truth") is False


@pytest.mark.parametrize(
    ("text", "quantity", "words"),
    [
        ("112", "bytes", answers.NO_UNIT), ("112 G", "bytes", answers.WHICH_BASE), ("112 t", "bytes", answers.WHICH_BASE),
        ("112 Gb", "bytes", answers.BITS), ("112 Gbit", "bytes", answers.BITS), ("112 parsecs", "bytes", answers.NO_UNIT),
        ("many", "bytes", answers.EMPTY), ("GB", "bytes", answers.EMPTY), ("nan GB", "bytes", answers.EMPTY),
        ("1,5 GB", "bytes", answers.COMMA), ("1,23,456 B", "bytes", answers.COMMA), ("1.2.3 GB", "bytes", answers.OTHER_UNIT),
        ("1e999999999 B", "bytes", answers.TOO_LARGE), ("2^5000 B", "bytes", answers.TOO_LARGE),
        ("1/0 x", "ratio", answers.EMPTY),
        ("2 GB", "ratio", answers.OTHER_UNIT), ("14 bananas", "gpus", answers.OTHER_UNIT),
        ("perhaps", "truth", answers.YES_OR_NO),
        ("9" * 201, "gpus", answers.TOO_LONG), ("86 GB", "flop", answers.OTHER_UNIT),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_why(text: str, quantity: Quantity, words: object) -> None:
    with pytest.raises(NotANumber) as raised:
        typed(text, quantity)
    assert raised.value.words is words


@given(st.text(max_size=300), st.sampled_from(("bytes", "ratio", "flop", "gpus", "parameters", "truth")))
def test_any_line_is_read_or_refused(text: str, quantity: Quantity) -> None:
    try:
        found = typed(text, quantity)
    except NotANumber:
        return
    assert isinstance(found, bool | Typed)


@given(
    st.text(alphabet="0123456789.,eE+-/^*x× GMTKib%亿万个倍１２", max_size=40),
    st.sampled_from(("bytes", "ratio", "flop", "gpus", "parameters")),
)
def test_lines_that_look_like_numbers(text: str, quantity: Quantity) -> None:
    test_any_line_is_read_or_refused.hypothesis.inner_test(text, quantity)  # type: ignore[attr-defined]


@given(st.integers(1, 10**15), st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_in_any_unit_is_the_size(nbytes: int, unit: str) -> None:
    from memcalc.units import to_bytes

    assert value(f"{nbytes:,}/{to_bytes(1, unit)} {unit}".replace(",", ""), "bytes") == nbytes
