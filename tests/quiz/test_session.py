"""A session: answers, hints, skipped questions, lines that cannot be read, and the score."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from memcalc.quiz.dealt import deal, kinds_of
from memcalc.quiz.printed import Printer, answer_of
from memcalc.quiz.question import Question
from memcalc.quiz.session import Score, play


def questions(number: int = 3, language: str = "en") -> list[Question]:
    return list(deal(kinds_of("zero", 1), 1, number, language))


def played(lines: list[str], asked: list[Question], language: str = "en") -> tuple[str, Score]:
    """Return what is printed for these lines, and the score."""
    out, score = io.StringIO(), Score()
    left: Iterator[str] = iter(lines)
    printer = Printer(out, language)
    play(asked, lambda: next(left, None), printer, score)
    printer.score(score)
    return out.getvalue(), score


def right(question: Question) -> str:
    return answer_of(question, "en").split(" = ")[0]


def numbers(score: Score) -> tuple[int, int, int]:
    return score.number("right"), score.number("wrong"), score.number("skipped")


def test_right_wrong_and_skipped_are_counted() -> None:
    asked = questions()
    text, score = played([right(asked[0]), "1 B", ""], asked)
    assert numbers(score) == (1, 1, 1)
    assert "Right." in text and "Not right." in text and "Skipped." in text
    assert "Score: 1 of 2 right; 1 skipped." in text
    assert text.count("To read: memcalc explain zero") == 1
    assert text.count("Answer: ") == 3


@pytest.mark.parametrize("word", ["", "s", "Skip", "跳过"])
def test_a_question_is_skipped_by_an_empty_line_or_a_word(word: str) -> None:
    asked = questions(1)
    _, score = played([word], asked)
    assert numbers(score) == (0, 0, 1)


def test_nothing_is_to_read_where_all_is_right() -> None:
    asked = questions()
    text, score = played([right(each) for each in asked], asked)
    assert numbers(score) == (3, 0, 0)
    assert "Score: 3 of 3 right." in text
    assert "To read" not in text


@pytest.mark.parametrize("end", [[], ["q"], ["Q"], ["quit"], ["退出"]])
def test_the_end_has_the_score_so_far(end: list[str]) -> None:
    asked = questions()
    text, score = played([right(asked[0]), *end], asked)
    assert numbers(score) == (1, 0, 0)
    assert "Score: 1 of 1 right." in text


@pytest.mark.parametrize("key", ["?", " ? ", "？"])
def test_a_hint_does_not_count(key: str) -> None:
    asked = questions(1)
    text, score = played([key, right(asked[0])], asked)
    assert numbers(score) == (1, 0, 0)
    assert "It counts: " in text.split("Right.")[0]


def test_what_cannot_be_read_is_asked_again() -> None:
    asked = questions(1)
    text, score = played(["112", "112 Gbit", right(asked[0])], asked)
    assert numbers(score) == (1, 0, 0)
    assert text.count("Not read: ") == 2
    assert "A size needs a unit" in text


def test_input_that_never_has_an_answer_ends() -> None:
    asked = questions(2)
    _, score = played(["y"] * 1000, asked)
    assert numbers(score) == (0, 0, 2)


def test_the_wrong_unit_is_said() -> None:
    asked = questions(1)
    gigabytes = int(asked[0].answer) / 1e9
    text, score = played([f"{gigabytes:.6f} GiB"], asked)
    assert numbers(score) == (0, 1, 0)
    assert "The number is right, the unit is not: it is GB." in text


def test_chinese() -> None:
    asked = questions(2, "zh")
    text, score = played(["？", "约 ３ Ｇ", f"{asked[0].answer}字节", ""], asked, "zh")
    assert numbers(score) == (1, 0, 1)
    for words in (
        "计入：",
        "无法识别：",
        "正确。",
        "已跳过。",
        "答案：",
        "得分：答对 1 题",
        "建议阅读：memcalc explain zero",
    ):
        assert words in text
    assert "Given" not in text
