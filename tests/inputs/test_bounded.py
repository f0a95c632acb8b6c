"""Files that never end, never begin, are too large or hold what no config.json does: one line each, soon, in little memory."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from command import LLAMA, check_refused, program, write_config

import memcalc
from memcalc.inputs import bounded
from memcalc.inputs.bounded import CONFIG, TooLarge, read_bounded
from memcalc.units import MIB

posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a path here")


def test_all_that_a_file_has(tmp_path: Path) -> None:
    for size in (0, 1, 65536, 3 * MIB):
        path = tmp_path / str(size)
        path.write_bytes(os.urandom(size))
        assert read_bounded(path, size) == path.read_bytes()


def test_a_byte_more_than_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (MIB + 1))
    with pytest.raises(TooLarge, match=r"^larger than 1 MiB$"):
        read_bounded(path, MIB)
    assert len(read_bounded(path, MIB + 1)) == MIB + 1


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match="directory"):
            read_bounded(path, MIB)


@posix
def test_a_pipe_is_read_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for part in (b"ab", b"cd"):
                file.write(part)
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_bounded(path, MIB) == b"abcd"
    writer.join()


@posix
def test_a_pipe_that_nobody_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "PATIENCE", 0.2)
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(TimeoutError):
        read_bounded(path, MIB)
    with pytest.raises(memcalc.InputError, match=r"^--model .*not all there within 0\.2 seconds"):
        memcalc.load_model(tmp_path)


@posix
def test_a_pipe_that_is_never_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "PATIENCE", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    try:
        os.write(held, b"{")
        with pytest.raises(TimeoutError):
            read_bounded(path, MIB)
    finally:
        os.close(held)


# --- as a program


@posix
@pytest.mark.parametrize("command", ["estimate -m", "models", "validate -m", "validate --suite"])
def test_what_never_ends(command: str) -> None:
    check_refused(program(*command.split(), "/dev/zero"), "/dev/zero", "larger than 8 MiB")


def test_a_file_of_300_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(300 * 10**6)
    check_refused(program("estimate", "-m", str(path)), str(path), "larger than 8 MiB", "a config.json")


@posix
def test_a_loop_of_links(tmp_path: Path) -> None:
    for name in ("config.json", "loop"):
        (tmp_path / name).symlink_to(name)
    with pytest.raises(memcalc.InputError, match=r"no config\.json"):
        memcalc.load_model(tmp_path)
    with pytest.raises(memcalc.InputError, match="no such file"):
        memcalc.load_model(tmp_path / "loop")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b'{"a":' * 5000, b'{"model_type": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model_type": "llama", "hidden_size": NaN}', b'{"model_type": "llama", "vocab_size": Infinity}',
        b'{"model_type": "llama", "hidden_size": 1e999}', b'{"model_type": "llama", "hidden_size": 1' + b"0" * 5000 + b"}",
        b'{"model_type": "llam\xe9"}', b"", b"\x00" * 1000, b'{"model_type": "llama"',
    ],
    ids=["lists", "objects", "nested", "nan", "infinity", "1e999", "digits", "latin", "empty", "zeros", "cut"],
)  # fmt: skip
def test_content_that_is_none(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(memcalc.InputError, match=r"^--model ") as error:
        memcalc.load_model(write_config(tmp_path, content))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 700


def test_the_limit_is_far_above_what_is_published(tmp_path: Path) -> None:
    """A label for each of ImageNet's 21 841 classes, and a quantized module for each of 100 000 names."""
    labels = {str(i): f"the name of a class of images, of several words, and its number {i}" for i in range(21_841)}
    modules = [f"model.layers.{i // 100}.mlp.experts.{i % 100}.gate_proj" for i in range(100_000)]
    path = write_config(tmp_path, {**LLAMA, "id2label": labels, "modules_to_not_convert": modules})
    assert Path(path).stat().st_size < CONFIG
    assert memcalc.load_model(path).num_parameters == memcalc.load_model(LLAMA).num_parameters


@posix
def test_stdin_is_a_file_like_any_other() -> None:
    import subprocess

    from command import PROGRAM, environment

    done = subprocess.run(
        [*PROGRAM, "models", "/dev/stdin", "--json"], input=json.dumps(LLAMA).encode(), capture_output=True,
        env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == b""
    assert json.loads(done.stdout)["parameters"] == memcalc.load_model(LLAMA).num_parameters
