"""`memcalc quiz`, from a pipe, for scripts, and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import time

import pytest
from command import LONG, PROGRAM, check_refused, environment, here, program
from crossed import crossed

from memcalc.explanation.topics import TOPICS

SCORE = "Score: "


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


def piped(text: bytes, *arguments: str, **changes: str) -> tuple[int, str, str]:
    """Run the quiz with answers from a pipe."""
    done = subprocess.run(
        [*PROGRAM, "quiz", *arguments],
        input=text,
        capture_output=True,
        env=environment(**changes),
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_answers_from_a_pipe() -> None:
    status, out, err = piped(b"\n1 GB\n?\n", "--seed", "7", "-n", "5")
    assert (status, err) == (0, "")
    assert out.startswith("Questions: 5. Seed 7: --seed 7 asks them again.")
    assert "> 1 GB\n" in out
    assert SCORE in out
    assert "\x1b" not in out


def test_answers_of_the_document_are_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("quiz", "--seed", "3", "-n", "12")
    found = json.loads(here(capsys, *arguments, "--json").stdout)["questions"]
    units = {"bytes": " B"}
    answers = [
        ("yes" if each["answer"] else "no")
        if each["unit"] == "truth"
        else f"{each['answer']}{units.get(each['unit'], '')}"
        for each in found
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))
    ran = here(capsys, *arguments)
    assert (ran.status, ran.stderr) == (0, "")
    assert f"Score: {len(found)} of {len(found)} right." in ran.stdout


def test_without_a_seed_it_is_printed_and_repeats() -> None:
    _, out, _ = piped(b"")
    seed = out.split("Seed ")[1].split(":")[0]
    assert piped(b"", "--seed", seed)[1] == out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "quiz", "--json", "--seed", "1", "--questions", "4")
    assert (ran.status, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert list(found) == ["schema_version", "seed", "language", "questions"]
    assert (found["seed"], len(found["questions"])) == (1, 4)
    keys = [
        "topic",
        "level",
        "kind",
        "question",
        "given",
        "how",
        "unit",
        "answer",
        "tolerance",
        "hint",
        "derivation",
        "command",
        "read",
    ]
    assert all(list(question) == keys for question in found["questions"])
    assert "seed" in json.loads(here(capsys, "quiz", "--json", "-n", "1").stdout)


def test_topic_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(here(capsys, "quiz", "--json", "--topic", "moe", "--level", "3", "-n", "3").stdout)["questions"]
    assert {(question["topic"], question["level"]) for question in found} == {("moe", 3)}


def test_chinese_is_asked_for_or_the_locales(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = here(capsys, "quiz", "--seed", "1", "--json", "--lang", "zh").stdout
    assert "已知" in asked
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert here(capsys, "quiz", "--seed", "1", "--json").stdout == asked


@pytest.mark.parametrize(("width", "language"), crossed([20, 40, 80, 200], ["zh", "en"]))
def test_lines_fold_to_the_width(width: int, language: str) -> None:
    from rich.cells import cell_len

    _, out, _ = piped(b"\n" * 12, "--seed", "2", "-n", "12", "--lang", language, COLUMNS=str(width))
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= max(width, max(map(len, TOPICS)))
    if language == "zh" and width >= 40:
        assert not [line for line in lines if line.lstrip()[:1] in ("，", "。", "；", "：", "、", "）", "？")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--topic", "zeroo"), ("--topic zeroo", "did you mean zero")),
        (("--topic", ""), ("--topic ''", "allowed: adam")),
        (("--topic", LONG), ("--topic",)),
        (("--level", "4"), ("--level 4", "allowed: 1, 2, 3")),
        (("--level", "x"), ("--level x",)),
        (("--level", "1", "--topic", "cuda-context"), ("cuda-context", "allowed: 2")),
        (("--seed", "-1"), ("--seed -1",)),
        (("--seed", "x"), ("--seed x",)),
        (("--seed", "9" * 5000), ("--seed",)),
        (("--questions", "0"), ("--questions 0", "from 1 to 100")),
        (("--questions", "-3"), ("--questions -3",)),
        (("--questions", "100000"), ("--questions 100000",)),
        (("--lang", "fr"), ("--lang fr", "en, zh")),
        (("zero",), ("zero",)),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(here(capsys, "quiz", *arguments), *words)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\x00\n", b"\n\n\n\n", b"y\n" * 1000, b"9" * 100_000, b"1 GB"])
def test_any_input_ends_with_a_score(text: bytes) -> None:
    status, out, err = piped(text, "-n", "2", "--seed", "1")
    assert (status, err) == (0, "")
    assert SCORE in out


def test_bytes_that_are_no_text_are_read() -> None:
    status, out, err = piped(b"\xff\n112 \xe5 GB\n", "-n", "1", "--seed", "1", PYTHONIOENCODING="utf-8:strict")
    assert (status, err) == (0, "")
    assert SCORE in out


@pytest.mark.parametrize("stdin", ["<&-", "0>/dev/null"], ids=["closed", "cannot be read"])
def test_a_stdin_that_has_no_lines_ends(stdin: str) -> None:
    command = " ".join(["exec", PROGRAM[0], "-c", f"'{PROGRAM[2]}'", "quiz", "-n", "1", stdin])
    done = subprocess.run(["sh", "-c", command], capture_output=True, env=environment(), timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Score: 0 of 0" in done.stdout


def test_a_shell_is_offered_topics() -> None:
    asked = {"_MEMCALC_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "memcalc quiz --topic ze"}
    assert "zero" in program("", **asked).stdout


# --- on a terminal


def on_a_terminal(keys: list[bytes | int]) -> tuple[int, str]:
    """Run the quiz on a terminal; what is typed, or the signal that is sent, after each prompt. Its status and all it wrote."""
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and what it starts
        os.execve(PROGRAM[0], [*PROGRAM, "quiz", "--seed", "7", "-n", "3"], environment(TERM="xterm", LANG="C.UTF-8"))
    written = b""
    prompts = 0
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        written += read
        if written.count(b"\n> ") > prompts and written.endswith(b"> ") and prompts < len(keys):
            key = keys[prompts]
            prompts += 1
            time.sleep(0.5)
            if isinstance(key, int):
                os.kill(process, key)
            else:
                os.write(terminal, key)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), written.decode()


@pytest.mark.parametrize(
    "last",
    [b"\x03", *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, b"\x04", b"q\n"))],
    ids=["Ctrl-C", "SIGINT", "Ctrl-D", "q"],
)
def test_it_ends_cleanly(last: bytes | int) -> None:
    status, written = on_a_terminal([b"?\n", b"\n", last])
    assert status == 0
    assert "Score: 0 of 0 right; 1 skipped." in written
    assert "Traceback" not in written
    assert "interrupted" not in written


def test_a_whole_quiz_on_a_terminal() -> None:
    status, written = on_a_terminal([b"1 B\n", b"2 x\n", b"\n", b"\n", b"\n", b"\n"])
    assert status == 0
    assert "Score: " in written
    assert written.count("> 1 B\r\n") == 1  # echoed by the terminal alone
