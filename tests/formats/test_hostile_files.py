"""Files that would take hours or all memory to read: each ends with one line within a second and 200 MiB, as a process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NINE = 9 * 10**5
_READER = """
import json, sys, time
import memcalc

out = []
for option, path in json.load(sys.stdin):
    start = time.process_time()
    try:
        memcalc.estimate("gpt2", seq_len=16, **{option: path})
        said = ""
    except memcalc.InputError as error:
        said = str(error)
    out.append((time.process_time() - start, said))
peak = next((line for line in open("/proc/self/status") if line.startswith("VmHWM:")), "VmHWM: 0 kB")
print(json.dumps({"files": out, "kib": int(peak.split()[1])}))
"""


def _chained(step: str) -> str:
    """Return mappings or lists of which each holds the one before many times."""
    names = "abcdefghijkl"
    return "a: &a {x: 1}\n" + "".join(
        f"{name}: &{name} " + step.format(f"*{before}") + "\n" for before, name in itertools.pairwise(names)
    )


def _files() -> Iterator[tuple[str, str, str | bytes]]:
    """Yield the option, the name and the content of each file."""
    wide = "a: &a {" + ", ".join(f"k{i}: 1" for i in range(4000)) + "}\n"
    yield "training_args", "lists.yaml", _chained("[{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}]")
    yield "training_args", "maps.yaml", _chained("{{p: {0}, q: {0}, r: {0}, s: {0}, t: {0}, u: {0}, v: {0}}}")
    yield "accelerate", "merges.yaml", _chained("{{<<: [{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}], own: 1}}")
    yield "training_args", "merged.yaml", wide + "".join(f"b{i}: {{<<: *a}}\n" for i in range(4000))
    yield "training_args", "merged_often.yaml", wide + "b: {<<: [" + ", ".join(["*a"] * 4000) + "]}\n"
    yield "training_args", "of_itself.yaml", "a: &a {<<: *a, b: *a}\nper_device_train_batch_size: 1\n"
    yield "training_args", "cycle.yaml", "a: &a [*a]\nper_device_train_batch_size: *a\n"
    yield "training_args", "base_60.yaml", "per_device_train_batch_size: 1" + ":59" * (_NINE // 3)
    yield "training_args", "digits.yaml", "per_device_train_batch_size: " + "9" * _NINE
    yield "training_args", "hex.yaml", "per_device_train_batch_size: 0x" + "f" * _NINE
    yield "training_args", "tagged.yaml", 'per_device_train_batch_size: !!int "1' + ":59" * (_NINE // 3) + '"'
    yield "deepspeed", "digits.json", '{"train_micro_batch_size_per_gpu": ' + "9" * _NINE + "}"
    yield "deepspeed", "deep.json", '{"a":' * (_NINE // 5)
    yield "deepspeed", "text.json", '{"zero_optimization": {"stage": "' + "x" * _NINE + '"}}'
    yield "deepspeed", "truncated.json", '{"train_batch_size": 8, "zero_opt'
    yield "deepspeed", "utf_16.json", '{"train_batch_size": 8}'.encode("utf-16")
    yield "deepspeed", "binary.json", bytes(range(256)) * 2000
    yield "deepspeed", "binary.yaml", bytes(range(256)) * 2000
    yield "deepspeed", "nulls.yaml", b"\0" * 1000
    yield "torchtitan", "dotted.toml", "a" + ".a" * (_NINE // 2) + " = 1"
    yield "torchtitan", "header.toml", "[a" + ".a" * (_NINE // 2) + "]\nb = 1"
    yield "torchtitan", "quoted.toml", '"a"' + ' . "a"' * (_NINE // 6) + " = 1"
    yield "torchtitan", "digits.toml", "[training]\nseq_len = " + "9" * _NINE
    yield "torchtitan", "tables.toml", "".join(f"[a.b{i}]\nc = 1\n" for i in range(40_000))
    name = "model_name_or_path: gpt2\nper_device_train_batch_size: 1\nuse_peft: true\n"
    yield "training_args", "targets.yaml", name + "lora_target_modules: " + "layers." * 10_000
    axolotl = "base_model: gpt2\nsequence_len: 16\nunfrozen_parameters: "
    yield "training_args", "groups.yaml", axolotl + "'([a-z._]*)*Z'"
    yield "training_args", "stars.yaml", axolotl + "'.*.*.*.*.*.*.*.*.*Z'"


FILES = list(_files())


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hostile")
    for _, name, content in FILES:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    asked = json.dumps([(option, str(folder / name)) for option, name, _ in FILES])
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-c", _READER], input=asked, capture_output=True, text=True, timeout=120, env=environment
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("index", range(len(FILES)), ids=[name for _, name, _ in FILES])
def test_one_line_within_a_second(read: dict[str, Any], index: int) -> None:
    seconds, said = read["files"][index]
    assert seconds < 1
    assert said.startswith("--") and said.isprintable() and len(said) < 700


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell a process's peak")
def test_all_of_them_within_200_mib(read: dict[str, Any]) -> None:
    assert 0 < read["kib"] < 200 * 1024
