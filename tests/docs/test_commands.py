"""Every command that the READMEs and the documents show runs, without a network, a GPU or files of the reader's."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from command import LLAMA, here

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```yaml\n# ([\w.-]+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A file that a page shows: its name, as the first line, and its content."""
NOT_RUN = {
    ("validate",): "runs torch for ten seconds to minutes: tests/validate has its own cases",
}
"""How the arguments of a command begin that is shown and not run, and why."""


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def commands(text: str) -> list[str]:
    """The lines of fenced sh blocks that start with memcalc."""
    lines = [line.strip() for block in FENCE.findall(text) for line in block.splitlines()]
    return [line for line in lines if re.match(r"memcalc\s", line)]


def arguments(command: str) -> tuple[str, ...]:
    """The words after memcalc, without a comment."""
    return tuple(shlex.split(command, comments=True)[1:])


def is_run(words: tuple[str, ...]) -> bool:
    return not any(words[: len(start)] == start for start in NOT_RUN)


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}
SFT = {"model_name_or_path": "./config.json", "dataset_text_field": "text", "max_length": 64, "bf16": True}

BY_PAGE = {path.relative_to(ROOT).as_posix(): commands(path.read_text(encoding="utf-8")) for path in pages()}


def test_a_command_is_found_with_its_arguments() -> None:
    text = "memcalc no\n```sh\npip install . && memcalc x\nmemcalc estimate -m 'a b'  # why\n```\n```text\nmemcalc no\n```\n"
    assert [arguments(line) for line in commands(text)] == [("estimate", "-m", "a b")]


def outside(text: str) -> list[str]:
    """The lines that start with memcalc in fenced blocks without a language, or with a shell's other names."""
    blocks = re.findall(r"^```(\S*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for kind, block in blocks if kind in ("", "bash", "shell", "console") for line in block.splitlines()]
    return [line for line in lines if re.match(r"\s*(\$ )?memcalc\s", line)]


@pytest.mark.parametrize("page", list(BY_PAGE))
def test_commands_stand_where_a_test_runs_them(page: str) -> None:
    assert outside((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_command_outside_of_the_blocks_that_run_is_found() -> None:
    text = "```sh\nmemcalc a b\n```\n\n```\nmemcalc c d\n```\n\n```bash\n$ memcalc e f\n```\n"
    assert outside(text) == ["memcalc c d", "$ memcalc e f"]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in BY_PAGE.items() if found])
def test_every_command_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that has what the commands read: a config.json, and files of other tools."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (tmp_path / "ds_config.json").write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(json.dumps(SFT), encoding="utf-8")
    for name, content in FILE.findall((ROOT / page).read_text(encoding="utf-8")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    for words in dict.fromkeys(arguments(line) for line in BY_PAGE[page]):
        if is_run(words):
            ran = here(capsys, *words)
            fails = ran.status == 1 and "--check" in words
            assert ran.status == 0 or fails, f"{page}: memcalc {shlex.join(words)}: {ran.stderr}"
            said = [line for line in ran.stderr.splitlines() if words[0] != "emit" or not line.startswith("not in ")]
            assert said == [], f"{page}: memcalc {shlex.join(words)}: {ran.stderr}"


def test_what_is_not_run_is_shown_somewhere() -> None:
    shown = {arguments(line)[0] for found in BY_PAGE.values() for line in found}
    assert {start[0] for start in NOT_RUN} <= shown


def test_the_readme_shows_the_five_tasks() -> None:
    readme = BY_PAGE["README.md"]
    assert len(readme) >= 5
    with contextlib.suppress(KeyError):
        assert [arguments(line) for line in BY_PAGE["README.zh.md"]] == [arguments(line) for line in readme]
