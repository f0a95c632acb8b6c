"""A process for each case, without a GPU."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import threading
import time
from typing import Any

import pytest

import memcalc
from memcalc.validate import run, server
from memcalc.validate.server import Server

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4}  # fmt: skip


@pytest.mark.slow
def test_cases_are_answered_one_by_one() -> None:
    with Server("fake") as ask:
        measured = ask({"model": LLAMA, "precision": "bf16", "seq_len": 16})
        refused = ask({"model": LLAMA, "precision": "fp7"})
        again = ask({"model": LLAMA, "precision": "bf16", "seq_len": 16})
    assert measured == again == run.outcome({"model": LLAMA, "precision": "bf16", "seq_len": 16}, "fake")
    assert refused["outcome"] == "refused"
    assert "--precision fp7" in refused["why"]


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_what_is_not_there_is_said_first(backend: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"--backend {backend}"), Server(backend):
        raise AssertionError


class Lines(list[str]):
    """What is read from a pipe, a case per line."""

    def __init__(self, cases: list[str], pipe: int) -> None:
        super().__init__(json.dumps(case) + "\n" for case in cases)
        self.pipe = pipe

    def fileno(self) -> int:
        return self.pipe


def test_a_case_that_dies_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(case: Any, _: str) -> dict[str, Any]:
        print("a word of some library's")
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "ends":
            os._exit(3)
        if case == "waits":
            time.sleep(60)
        if case == "raises":
            raise KeyboardInterrupt
        return {"outcome": case}

    monkeypatch.setattr(run, "outcome", outcome)
    read, write = os.pipe()
    cases = ["fine", "killed", "ends", "waits", "raises", "fine"]
    with os.fdopen(write, "w") as answers, os.fdopen(read) as written:
        server.serve("fake", 1, Lines(cases, read), answers)
        answers.close()
        made = [json.loads(line) for line in written]
    assert [one["outcome"] for one in made] == ["ready", "fine", "failed", "failed", "failed", "failed", "fine"]
    assert [one["why"] for one in made[2:6]] == [
        "its process was ended by SIGKILL", "its process ended with status 3", "did not end within 1 s",
        "its process ended with status 1",
    ]  # fmt: skip


def test_a_case_collects_nothing_that_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second with torch and transformers, at every phase of a step."""
    monkeypatch.setattr(run, "outcome", lambda *_: {"outcome": len(gc.get_objects())})
    read, write = os.pipe()
    with os.fdopen(write, "w") as answers, os.fdopen(read) as written:
        server.serve("fake", 60, Lines(["fine"], read), answers)
        answers.close()
        *_, counted = [json.loads(line)["outcome"] for line in written]
    assert counted < 1000


def test_a_case_ends_with_who_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However that ended: a pipe is closed by the system, too."""
    asks, asked = os.pipe()
    read, write = os.pipe()

    def outcome(*_: Any) -> dict[str, Any]:
        os.close(asked)  # the fork's own
        os.write(write, str(os.getpid()).encode())
        time.sleep(60)
        return {}

    monkeypatch.setattr(run, "outcome", outcome)
    began = time.monotonic()
    cases: list[int] = []

    def leave() -> None:
        cases.append(int(os.read(read, 20)))
        os.close(asked)

    threading.Thread(target=leave, daemon=True).start()
    with pytest.raises(SystemExit):
        server.serve("fake", 60, Lines(["fine"], asks), io.StringIO())
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(cases[0], 0)
    for end in (asks, read, write):
        os.close(end)


@pytest.mark.slow
def test_an_interrupted_suite_leaves_no_case_behind() -> None:
    one = Server("fake")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), one:
        assert one.process.stdin is not None
        one.process.stdin.write(json.dumps({"model": "llama-7b", "precision": "bf16"}) + "\n")
        one.process.stdin.flush()
        began = time.monotonic()
        raise KeyboardInterrupt
    assert one.process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_server_that_is_gone_is_an_outcome() -> None:
    one = Server("fake")
    with one as ask:
        one.process.kill()
        assert ask({"model": "gpt2"}) == {"outcome": "failed", "why": "the process that runs the cases has ended"}
