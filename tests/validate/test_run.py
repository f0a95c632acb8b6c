"""Cases, suites and records; what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.validate import place, recording, run
from memcalc.validate.comparison import predicted_memory
from memcalc.validate.recording import run_suite
from memcalc.validate.run import validate
from memcalc.validate.suites import read_suite

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"backend": "tpu"}, "--backend tpu: allowed: fake, cuda"),
        ({"backend": "cuda"}, "--backend cuda: torch sees no CUDA device; allowed: fake"),
        (
            {"gpus": 8, "engine": "deepspeed", "zero": 0, "optimizer": "lion"},
            r"--optimizer lion \(for-loop\): .*adamw, adam",
        ),
        ({"gpus": 4, "tp": 4}, "--engine megatron: .*allowed: none, ddp, fsdp2, deepspeed"),
        ({"gpus": 8, "tp": 4, "pp": 2}, r"allowed: .* deepspeed; with --tp 4 --pp 2: --engine fsdp2 --zero 3$"),
        ({"gpus": 8, "engine": "megatron"}, "--engine megatron: .*allowed: none, ddp, fsdp2, deepspeed$"),
        ({"precision": "bf17"}, "--precision bf17"),
    ],
)
def test_what_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line) as caught:
        validate(LLAMA, **options)
    assert "\n" not in str(caught.value)


def test_slices_of_megatron_deepspeed_are_not_run() -> None:
    with pytest.raises(memcalc.InputError, match=r"--tp 2: with engine deepspeed to be run .*allowed: 1"):
        validate(LLAMA, engine="deepspeed", gpus=8, tp=2, zero=1)


@pytest.mark.parametrize(
    ("name", "known"),
    [("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("a GPU", None)],
)
def test_the_gpu_that_is_there(name: str, known: str | None) -> None:
    gpu = run.on_gpu(LLAMA, {"seq_len": 8}, name).gpu
    assert (None if gpu is None else gpu.name) == known
    own = run.on_gpu(LLAMA, {"seq_len": 8, "gpu": "a10"}, name).gpu
    assert own is not None
    assert own.name == "a10"


def test_workspaces_are_those_of_the_gpu_that_is_there() -> None:
    """Whether memcalc knows it or not."""
    environment = {"compute_capability": "9.0", "memory": str(10**12)}
    known, unknown = (run.on_gpu(LLAMA, {"seq_len": 8}, name) for name in ("NVIDIA H200", "NVIDIA H9000"))
    rows = [predicted_memory(report, "cuda", environment, real_ranks=False) for report in (known, unknown)]
    assert rows[0]["allocated"] == rows[1]["allocated"] == known.allocated
    assert rows[0]["peak"] == rows[1]["peak"] == known.peak + 2 * 32 * 2**20


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(memcalc.InputError, match=r"--optimizer lion: needs pip install 'memcalc-llm\[optimizers\]'"):
        validate(LLAMA, optimizer="lion", precision="bf16", seq_len=8)


def test_deepspeed_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(memcalc.InputError, match=r"--engine deepspeed: needs pip install 'memcalc-llm\[deepspeed\]'"):
        validate(LLAMA, gpus=2, zero=3, seq_len=8)


def test_a_document() -> None:
    document = validate(LLAMA, precision="bf16", seq_len=16).to_dict()
    assert json.loads(json.dumps(document)) == document
    assert set(document["environment"]) >= {"torch", "transformers"}
    names = [row["name"] for row in document["memory"]]
    assert names[:4] == ["parameters", "gradients", "optimizer_states", "saved_activations"]
    assert names[4:] == ["peak in forward", "peak in backward", "peak in step", "peak"]


CASES = [
    {"model": LLAMA, "precision": "bf16", "seq_len": 16},
    {"model": LLAMA, "precision": "fp7"},
    {"model": LLAMA, "precision": "fp32", "seq_len": 16},
]


@pytest.mark.slow
def test_a_suite_is_recorded_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, told = tmp_path / "record.json", list[str]()
    first = run_suite(CASES[:2], "fake", record, told.append)
    assert [made["outcome"] for made in first] == ["measured", "refused"]
    assert json.loads(record.read_text())["cases"] == first
    ran: list[Any] = []
    monkeypatch.setattr(run, "validate", lambda *args, **options: ran.append(options) or validate(*args, **options))
    second = run_suite(CASES, "fake", record, told.append)
    assert second[:2] == first
    assert [options["precision"] for options in ran] == [
        "fp32",
        "fp7",
    ]  # what was refused may run by now, after the others
    assert json.loads(record.read_text())["cases"] == second
    assert [line.split(":")[0] for line in told] == [
        "1/2 llama precision=bf16 seq_len=16", "2/2 llama precision=fp7", "2 cases",
        "1/3 llama precision=bf16 seq_len=16", "3/3 llama precision=fp32 seq_len=16", "2/3 llama precision=fp7", "3 cases",
    ]  # fmt: skip
    assert told[0].endswith("(+0.00%), all rows agree")
    assert told[3] == told[0].replace("1/2", "1/3") + ", as recorded"
    assert told[-1] == "3 cases: 2 measured, 1 refused; largest error of a peak +0.00%"
    assert list(tmp_path.iterdir()) == [record]
    run_suite([CASES[2]] * 2, "fake", None, told.append)
    assert [line.endswith(", as recorded") for line in told[-3:]] == [False, True, False]


def test_nothing_in_a_case_ends_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("who knows")

    monkeypatch.setattr(run, "validate", broken)
    made = run_suite(CASES, "fake", None, lambda _: None)
    assert [one["outcome"] for one in made] == ["failed with KeyError"] * 3
    own, last = made[0]["why"].removeprefix("'who knows' (").removesuffix(")").split(", ")
    assert re.fullmatch(r"memcalc/validate/run\.py:\d+", own)
    # Outside of what memcalc is installed beside, a file has its whole path.
    assert re.fullmatch(r"(/.+/)?tests/validate/test_run\.py:\d+", last)


def test_a_timeline_is_a_line_of_the_file(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "case": {"a": [1]},
        "timeline": [1, 2, 30],
        "none": [],
        "why": "[1,\n2]",
        "two": ["a", 1],
    }
    recording._write(tmp_path / "r.json", [document])
    text = (tmp_path / "r.json").read_text()
    assert "[ 1, 2, 30 ]" in text
    assert json.loads(text)["cases"] == [document]


@pytest.mark.parametrize("backend", ["tpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_suite_without_its_backend_does_not_begin(backend: str, tmp_path: Path) -> None:
    with pytest.raises(memcalc.InputError, match=f"--backend {backend}"):
        run_suite(CASES, backend, tmp_path / "record.json", lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [json.dumps(LLAMA), '{"cases": []}', '{"schema_version": 1, "cases": [1]}',
     '{"schema_version": 1, "cases": [{"a": 1}]}', "["],
)  # fmt: skip
def test_a_file_that_is_no_record_is_left_alone(content: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(content)
    with pytest.raises(memcalc.InputError, match="--record"):
        run_suite(CASES, "fake", record, lambda _: None)
    assert record.read_text() == content


class OutOfMemoryError(RuntimeError):
    """As torch's, which is one."""


def full(*_: Any, **__: Any) -> Any:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


class H100:
    """In the place of a GPU."""

    name = "NVIDIA H100 80GB HBM3"

    def environment(self) -> dict[str, str]:
        return {"gpu": self.name, "compute_capability": "9.0", "memory": "85000000000"}


def test_what_is_off_is_told() -> None:
    made: dict[str, Any] = {
        "case": {"model": "gpt2"}, "outcome": "measured", "communication": [],
        "memory": [{"name": "peak in step", "predicted": 5, "measured": 5}, {"name": "peak", "predicted": 99, "measured": 100}],
    }  # fmt: skip
    assert recording._said(made) == "peak predicted 99 B, measured 100 B (-1.00%), 1 row differs"
    failed = {"case": {"model": "gpt2"}, "outcome": "out of memory", "why": "full"}
    assert recording._summed_up([made, failed]) == (
        "2 cases: 1 measured, 1 out of memory; largest error of a peak -1.00% (gpt2)"
    )
    assert recording._summed_up([failed]) == "1 case: 1 out of memory"


def test_out_of_memory_is_an_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "validate", full)
    monkeypatch.setattr(recording, "runner", recording.InThisProcess)
    monkeypatch.setattr(run, "measurer", lambda _: None)
    monkeypatch.setattr(place, "place", H100)
    (made,) = run_suite(CASES[:1], "cuda", tmp_path / "r.json", lambda _: None)
    assert made["outcome"] == "out of memory"
    assert made["why"].startswith("CUDA out of memory")
    assert made["environment"]["gpu"] == H100.name
    report = memcalc.estimate(LLAMA, precision="bf16", seq_len=16, gpu="h100-80gb")
    assert made["predicted"] == {
        "peak": report.peak + 2 * 32 * 2**20, "reserved": report.reserved, "device": report.device,
    }  # fmt: skip
    again = run_suite(CASES[:1], "cuda", tmp_path / "r.json", lambda _: None)
    assert again == [made]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "field `cases`"),
        ('{"cases": []}', "field `cases`"),
        ('{"cases": [3]}', "field `cases`"),
        ("[", "--suite"),
        ('{"cases": [{"model": 5}]}', "field `model` is 5"),
        ('{"cases": [{"precision": "bf16"}]}', "field `model`"),
        ('{"cases": [{"model": "gpt2", "backend": "fake"}]}', "field `backend`"),
    ],
)
def test_a_suite_that_is_none(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "suite.json"
    file.write_text(content)
    with pytest.raises(memcalc.InputError, match=words):
        read_suite(str(file))
