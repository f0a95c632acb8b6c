"""Running the command line in tests: as a program of its own, or in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import memcalc
from memcalc.cli.main import main

if TYPE_CHECKING:
    import pytest

PACKAGE = Path(memcalc.__file__).resolve().parent
PROGRAM = (sys.executable, "-c", "from memcalc.cli.main import entry_point; entry_point()")
LONG = "x" * 10_000

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 256,
}  # fmt: skip
"""The fields of a small config.json."""


class Ran(NamedTuple):
    """What a command left behind."""

    status: int
    stdout: str
    stderr: str


def environment(**changes: str) -> dict[str, str]:
    """An environment in which a subprocess finds this package and no Hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "COLUMNS", "FORCE_COLOR"))}
    return {**kept, "PYTHONPATH": str(PACKAGE.parent), "PYTHONUTF8": "0", "HF_HUB_OFFLINE": "1", **changes}


def program(*arguments: str, **changes: str) -> Ran:
    """Run memcalc as a program of its own, in an environment with these changes."""
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, env=environment(**changes), timeout=60, check=False
    )
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run memcalc in this process."""
    capsys.readouterr()
    status = main(list(arguments))
    out, err = capsys.readouterr()
    return Ran(status, out, err)


def check_refused(ran: Ran, *words: str) -> None:
    """Exit status 2, nothing on stdout, one line on stderr that holds these words."""
    assert ran.status == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("memcalc: ")
    assert ran.stderr.endswith("\n")
    line = ran.stderr[:-1]
    assert line.isprintable(), line
    assert len(line) < 700
    for word in words:
        assert word in line


def write_config(folder: Path, content: object, name: str = "config.json") -> str:
    """A config.json with this content (bytes and str as they are); its path."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)
