"""Questions, answers and the score as text, and the whole quiz as a document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any, Final

from rich.text import Text

from memcalc.explanation.printed import WIDTH, print_line, print_section, section_document, shown
from memcalc.explanation.step import Step, Unit
from memcalc.explanation.words import Words
from memcalc.quiz.question import LEVELS, Question
from memcalc.report.consoles import console_for

if TYPE_CHECKING:
    from memcalc.quiz.session import Score

_HEAD: Final = Words(
    "{number}/{of} · {topic} · level {level}, {meaning}", "{number}/{of} · {topic} · 第 {level} 级，{meaning}"
)
_WITHIN: Final = Words(" Right within {percent}%.", "误差在 {percent}% 以内算对。")
_EXACT: Final = Words(" Only the exact number is right.", "必须完全正确。")
_HOW: Final = {
    "bytes": Words(
        "Answer with a unit: GB (10^9 bytes), GiB (2^30 bytes), MB, TB …",
        "请带单位作答：GB（10^9 字节）、GiB（2^30 字节）、MB、TB 等。",
    ),
    "flop": Words('Answer in FLOP: "86 TFLOP", "8.6e13" …', "请以 FLOP 作答：“86 TFLOP”“8.6e13” 等。"),
    "ratio": Words(
        'Answer as a factor, a fraction or with %: "2 x", "1/3", "12.5%" …',
        "请以倍数、分数或百分数作答：“2 倍”“1/3”“12.5%” 等。",
    ),
    "parameters": Words('Answer as a number: "7 billion", "7e9" …', "请用数字作答：“70 亿”“7e9” 等。"),
    "elements": Words('Answer as a number: "1.5 million", "1.5e6" …', "请用数字作答：“150 万”“1.5e6” 等。"),
    "gpus": Words("Answer with a number of GPUs.", "请回答 GPU 数。"),
    "micro-batches": Words("Answer with a number of micro-batches.", "请回答微批次数。"),
    "truth": Words("Answer yes or no.", "请回答“是”或“否”。"),
}
_TITLE: Final = Words(
    "Questions: {questions}. Seed {seed}: --seed {seed} asks them again.",
    "共 {questions} 题。种子 {seed}：用 --seed {seed} 可以重做同一组题。",
)
_KEYS: Final = Words(
    "Type an answer. An empty line skips the question, ? gives a hint, q ends the quiz.",
    "输入答案并回车。直接回车跳过本题，? 给出提示，q 结束。",
)
_ANSWER: Final = Words("Answer: {answer}", "答案：{answer}")
_COMMAND: Final = Words("To see it in full: {command}", "完整内容：{command}")
_SCORE: Final = Words("Score: {right} of {answered} right", "得分：答对 {right} 题，共答 {answered} 题")
_SKIPPED: Final = Words("; {skipped} skipped", "；跳过 {skipped} 题")
_READ: Final = Words("To read: {commands}", "建议阅读：{commands}")
_YES: Final = {True: Words("yes", "是"), False: Words("no", "否")}
_NOUNS: Final = {"micro-batches": Words("micro-batches", "个微批次")}
PROMPT: Final = "> "


class Printer:
    """Writes a quiz to a file in one language."""

    def __init__(self, file: IO[str], language: str) -> None:
        self.language = language
        self._file = file
        self._console = console_for(file, WIDTH)

    def say(self, words: Words, *, style: str = "", indent: int = 0, **values: object) -> None:
        """Write a sentence."""
        print_line(self._console, Text(words.said(self.language, **values), style=style), indent)

    def title(self, questions: int, seed: int) -> None:
        """Write the number of questions, the seed, and what can be typed."""
        self.say(_TITLE, style="bold", questions=questions, seed=seed)
        self.say(_KEYS)

    def question(self, question: Question, number: int, of: int) -> None:
        """Write a question and how it is answered."""
        self._console.print()
        meaning = LEVELS[question.level].said(self.language)
        self.say(_HEAD, style="bold", number=number, of=of, topic=question.topic, level=question.level, meaning=meaning)
        for sentence in (question.text, question.given):
            print_line(self._console, Text(sentence), 0)
        print_line(self._console, Text(how(question, self.language), style="dim"), 0)

    def prompt(self) -> None:
        """Write the prompt, at once."""
        self._file.write(PROMPT)
        self._file.flush()

    def line(self, text: str = "") -> None:
        """Write a line as it is: what was typed where nobody sees it, or the end of a prompt."""
        self._file.write(text + "\n")
        self._file.flush()

    def text(self, text: str) -> None:
        """Write a text that is in the language already."""
        print_line(self._console, Text(text), 0)

    def derivation(self, question: Question) -> None:
        """Write the answer, how it is derived, and the command that says more."""
        self.say(_ANSWER, style="bold", answer=answer_of(question, self.language))
        for section in question.derivation:
            print_section(self._console, section, self.language)
        self.say(_COMMAND, indent=2, command=question.command)

    def score(self, score: Score) -> None:
        """Write the score, and the topics of what was not right."""
        self._console.print()
        right, wrong, skips = (score.number(outcome) for outcome in ("right", "wrong", "skipped"))
        words = _SCORE.said(self.language, right=right, answered=right + wrong)
        skipped = _SKIPPED.said(self.language, skipped=skips) if skips else ""
        print_line(self._console, Text(words + skipped + (".", "。")[self.language == "zh"], style="bold"), 0)
        for topic in score.to_read:
            self.say(_READ, commands=f"memcalc explain {topic}")


def how(question: Question, language: str) -> str:
    """Return how a question is answered, and the tolerance."""
    words = _HOW[question.quantity].said(language)
    if question.quantity == "truth":
        return words
    tolerance = _WITHIN if question.percent else _EXACT
    return words + tolerance.said(language, percent=question.percent)


def answer_of(question: Question, language: str) -> str:
    """Return the answer with its unit."""
    if isinstance(question.answer, bool):
        return _YES[question.answer].said(language)
    noun = _NOUNS.get(question.quantity)
    if noun is not None:
        return f"{question.answer:,.0f} {noun.said(language)}"
    unit: Unit = question.quantity  # type: ignore[assignment]
    words = shown(Step("", "", "", question.answer, unit), language)
    return f"{words} = {100 * question.answer:.4g} %" if unit == "ratio" and question.answer < 1 else words


def document(questions: Iterable[Question], seed: int, language: str) -> dict[str, Any]:
    """Return a quiz for `--json`: the questions with their answers, tolerances and derivations."""
    return {
        "schema_version": 1,
        "seed": seed,
        "language": language,
        "questions": [_as_document(question, language) for question in questions],
    }


def _as_document(question: Question, language: str) -> dict[str, Any]:
    return {
        "topic": question.topic,
        "level": question.level,
        "kind": question.kind,
        "question": question.text,
        "given": question.given,
        "how": how(question, language),
        "unit": question.quantity,
        "answer": question.answer,
        "tolerance": question.percent / 100,
        "hint": question.hint,
        "derivation": [section_document(section) for section in question.derivation],
        "command": question.command,
        "read": f"memcalc explain {question.topic}",
    }
