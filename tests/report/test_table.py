"""The report as a person reads it: at every width, and plain where nobody sees colours."""

from __future__ import annotations

import io
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command import LLAMA, here
from rich.cells import cell_len

import memcalc
from memcalc.inputs.gpu import all_gpus, load_gpu
from memcalc.report import gpus, models
from memcalc.report.per_layer import shares
from memcalc.report.table import print_report
from memcalc.units import show_bytes

SETUPS: list[tuple[Any, dict[str, Any]]] = [
    ("llama-7b", {"gpus": 8, "zero": 3, "gpu": "a100-80gb"}),
    ("llama-2-70b", {"gpu": "h100-80gb", "micro_batch_size": 4}),
    ("gpt2", {"gpus": 8}),
    (LLAMA, {"precision": "fp32", "recompute": "full", "seq_len": 1}),
]


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[40, 80, 200])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return request.param


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def check_width(shown: str, width: int) -> list[str]:
    lines = without_colours(shown).splitlines()
    assert [line for line in lines if cell_len(line) > width] == []
    return lines


@cache
def bundled(name: str) -> memcalc.Model:
    """A model with the runs that were made of it: a test at another width makes no others."""
    return memcalc.load_model(name)


def table(model: Any, options: dict[str, Any], file: io.StringIO, *, rows: bool = False, verbose: bool = False) -> str:
    params = {"model": bundled(model) if isinstance(model, str) else model} if model is not None else {}
    print_report(memcalc.estimate(**params, **options), rows=rows, verbose=verbose, file=file)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), [*SETUPS, (None, {"params": "7.5B", "gpus": 64, "zero": 2})])
@pytest.mark.parametrize("rows", [False, True])
def test_a_terminal_of_any_width(model: Any, options: dict[str, Any], rows: bool, width: int) -> None:
    shown = table(model, options, Terminal(), rows=rows, verbose=rows)
    assert "\x1b[" in shown
    check_width(shown, width)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), SETUPS)
def test_the_numbers_are_there_at_any_width(model: Any, options: dict[str, Any], width: int) -> None:
    """A narrow terminal may cut names, never numbers."""
    shown = " ".join(without_colours(table(model, options, Terminal(), verbose=True)).split())
    report = memcalc.estimate(bundled(model) if isinstance(model, str) else model, **options)
    sizes = [report.peak, report.allocated, report.reserved, report.device, *report.phases.values()]
    sizes += [report.total(component) for component in ("parameters", "optimizer_states", "saved_activations")]
    for size in sizes:
        assert show_bytes(size) in shown


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), SETUPS)
def test_anything_but_a_terminal_is_plain(model: Any, options: dict[str, Any], width: int) -> None:
    shown = table(model, options, io.StringIO())
    assert "\x1b" not in shown
    check_width(shown, width)


@pytest.mark.parametrize("columns", ["", "0", "-5", "wide", "1e2", "9" * 30])
def test_a_pipe_has_a_width_of_its_own(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    own = table("llama-7b", {"gpus": 8, "zero": 3}, io.StringIO())
    assert max(map(len, check_width(own, 100))) == 100
    monkeypatch.setenv("COLUMNS", columns)
    assert table("llama-7b", {"gpus": 8, "zero": 3}, io.StringIO()) == own
    monkeypatch.setenv("COLUMNS", "60")
    check_width(table("llama-7b", {"gpus": 8, "zero": 3}, io.StringIO()), 60)


def test_lists_are_not_cut_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others read them line by line; whoever sets COLUMNS has them at that width, as a report."""
    for columns in ("", "40", "90"):
        monkeypatch.setenv("COLUMNS", columns)
        file = io.StringIO()
        gpus.print_list(all_gpus(), file)
        assert "…" not in file.getvalue()
        assert ("full name" in file.getvalue().splitlines()[0]) is (columns == "")
        if columns:
            check_width(file.getvalue(), int(columns))


def without_spaces(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("columns", [40, 60, 75, 100, 200])
def test_what_names_a_collective_is_there_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase and kind, the axis of a layer's, calls and payload; what is left out is named."""
    monkeypatch.setenv("COLUMNS", str(columns))
    report = memcalc.estimate("llama-7b", gpus=8, tp=2, zero=3, engine="fsdp2")
    file = io.StringIO()
    print_report(report, rows=False, per_layer=True, verbose=True, file=file)
    shown = file.getvalue().split("Communication per step")[1]
    step, layer = (" ".join(part.split()) for part in shown.split("Communication of one layer"))
    of_layers = shares(report)
    for part, own in ((step, report.collectives), (layer, [share.collective for share in of_layers])):
        for name in ("phase", "collective"):
            for word, count in Counter(getattr(c, name) for c in own).items():
                assert len(re.findall(rf"(?<= ){word}(?= )", part.split("per layer:")[0])) == count, word
    for c in report.collectives:
        assert f" {c.calls} {show_bytes(c.payload)} " in step
    for share in of_layers:
        assert f" {share.calls:.3g} {show_bytes(share.payload)} " in layer
        assert without_spaces(share.formula) in without_spaces(layer)
    assert {"tp", "dp"} <= set(layer.split())
    for part in (step, layer):
        assert ("no room for: wire" in part) is (" wire " not in part.split("_")[0])


def test_what_the_report_says() -> None:
    shown = table("llama-7b", {"gpus": 8, "zero": 3, "gpu": "a100-40gb", "micro_batch_size": 4}, io.StringIO())
    for text in (
        "llama-7b",
        "6.74 B parameters",
        "8 GPUs",
        "ZeRO 3",
        "micro-batch 4 × 2048 tokens",
        "does not fit",
        "what makes it fit",
    ):
        assert text in " ".join(shown.split())


MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8}
TITLES: list[tuple[Any, dict[str, Any], str]] = [
    (LLAMA, {}, "1 GPU · plain PyTorch · bf16-mixed · adamw (foreach) · micro-batch 1 × 256 tokens · sdpa attention"),
    (LLAMA, {"gpus": 4, "engine": "ddp"}, "4 GPUs · ddp · dp 4 · bf16-mixed"),
    (LLAMA, {"global_batch_size": 6, "micro_batch_size": 2}, "(foreach) · 3 micro-batches · micro-batch 2 × 256 tokens"),
    (LLAMA, {"gpus": 2, "engine": "ddp", "global_batch_size": 6}, "3 micro-batches, gradients reduced after the last (no_sync)"),
    (LLAMA, {"gpus": 2, "engine": "fsdp2", "zero": 3, "global_batch_size": 6, "sync_each_micro_batch": True},
     "(foreach) · 3 micro-batches, gradients reduced after each · micro-batch"),
    (LLAMA, {"gpus": 2, "zero": 3, "engine": "fsdp2"}, "(foreach) · micro-batch 1"),
    (LLAMA, {"gpus": 8, "zero": 3, "engine": "fsdp2"}, "fsdp2, ZeRO 3 · dp 8 · bf16-mixed"),
    (LLAMA, {"gpus": 8, "zero": 3, "engine": "fsdp2", "shard_group": 2}, "ZeRO 3 · dp 8 · shard group 2 · bf16-mixed"),
    (LLAMA, {"gpus": 8, "zero": 1, "engine": "megatron", "tp": 2, "shard_group": 2}, "tp 2 · dp 4 · shard group 2 · sequence"),
    (LLAMA, {"gpus": 8, "zero": 1, "engine": "megatron", "shard_group": 8}, "megatron, ZeRO 1 · dp 8 · bf16-mixed"),
    (LLAMA, {"clip_grad_norm": True}, "adamw (foreach) · gradients clipped · micro-batch"),
    (LLAMA, {"engine": "megatron", "recompute": "full", "recompute_layers": 1}, "recompute full of 1 layer ·"),
    ("gpt2", {"gpus": 2, "pp": 2, "recompute": "full", "recompute_layers": 3}, "recompute full of 3 layers a stage ·"),
    (MIXTRAL, {"gpus": 4, "tp": 2, "ep": 2}, "tp 2 · ep 2 · dp 2 · sequence parallel"),
    (MIXTRAL, {"gpus": 4, "tp": 2, "ep": 4, "etp": 1}, "tp 2 · ep 4 · etp 1 · dp 2 · sequence parallel"),
    (MIXTRAL, {"gpus": 4, "ep": 2, "etp": 2, "tp": 1, "engine": "megatron"}, "megatron · ep 2 · etp 2 · dp 4 · bf16-mixed"),
    (None, {"params": "1B", "gpus": 8, "zero": 1}, "adamw (fused) · model states only"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "options", "text"), TITLES)
def test_the_title_says_what_changes_the_numbers(model: Any, options: dict[str, Any], text: str) -> None:
    assert text in " ".join(table(model, options, io.StringIO()).split("Memory per GPU")[0].split())


LARGE = "gpt2-large"


def test_a_batch_of_images_has_no_tokens() -> None:
    shown = table("resnet-50", {"micro_batch_size": 4}, io.StringIO())
    assert "micro-batch 4" in " ".join(shown.split())
    assert "tokens" not in shown
    assert "attention" not in shown


def test_advice_is_what_the_change_gives() -> None:
    options: dict[str, Any] = {"gpus": 8, "zero": 1, "micro_batch_size": 2}
    shown = table("llama-7b", options, io.StringIO())
    found = re.findall(r"^  (--\S.*?)  +saves (.*), leaves (.*)$", shown, re.MULTILINE)
    assert found
    before = memcalc.estimate("llama-7b", **options).peak
    for flags, saves, leaves in found:
        words = flags.split()
        changed = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        number = {name: int(value) if value.isdigit() else value for name, value in changed.items()}
        after = memcalc.estimate("llama-7b", **{**options, **number}).peak
        assert (show_bytes(before - after), show_bytes(after)) == (saves, leaves)


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    model = memcalc.load_model({**LLAMA, "_name_or_path": "[red]owner[/red]/x[0m"})
    out = io.StringIO()
    print_report(memcalc.estimate(model), rows=False, file=out)
    assert out.getvalue().startswith("[red]owner[/red]/x")
    out = io.StringIO()
    models.print_model(model, out)
    assert out.getvalue().startswith("[red]owner[/red]/x")


def test_models_and_gpus_at_any_width(width: int) -> None:
    chosen = [memcalc.load_model(name) for name in ("llama-7b", "gpt2", "mixtral-8x7b")]
    for show in (
        lambda file: models.print_list(chosen, file),
        lambda file: models.print_model(chosen[0], file),
        lambda file: gpus.print_list(all_gpus(), file),
        lambda file: gpus.print_gpu(load_gpu("h100-80gb"), file),
    ):
        terminal = Terminal()
        show(terminal)
        check_width(terminal.getvalue(), width)
        assert "…" not in terminal.getvalue().split()[0]


def test_communication_has_times_with_a_gpu_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can hide is in brackets; the line under the table adds up what cannot.

    203 gathers of forward on 8 A100: 20 µs each, and 11.87 GB at 180 GB/s.
    """
    options = {"gpus": 8, "zero": 3, "gpu": "a100-80gb"}
    shown = table("llama-7b", options, io.StringIO(), verbose=True)
    assert "(70 ms)" in shown
    assert (
        "time: the step waits at least 1.33 ms; what is in brackets can overlap, 70 ms with forward and 122 ms with backward"
        in " ".join(shown.split())
    )
    assert "70 ms" not in table("llama-7b", {"gpus": 8, "zero": 3}, io.StringIO(), verbose=True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    narrow = " ".join(without_colours(table("llama-7b", options, Terminal(), verbose=True)).split())
    assert "(70 ms)" not in narrow
    assert "no room for: wire, time; --json has all" in narrow
    assert "waits at least 1.33 ms" in narrow
    hidden = " ".join(table("gpt2", {"gpus": 8, "gpu": "a100-80gb"}, io.StringIO()).split())
    assert "time: all of it can overlap, " in hidden
    unknown = " ".join(table("gpt2", {"gpus": 16, "gpu": "rtx4090"}, io.StringIO()).split())
    assert "time: not known, because NVIDIA has no node with" in unknown


def test_heads_that_stay_whole_are_not_shared(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt_oss's plan under fsdp2 splits its output layer alone."""
    options = ("-m", "gpt-oss-20b", "--engine", "fsdp2", "--zero", "3", "--gpus", "16", "--tp", "16", "-s", "64")
    assert "share a key/value head" not in " ".join(here(capsys, "estimate", *options).stdout.split())
    shared = ("-m", "llama-3-8b", "--engine", "megatron", "--gpus", "16", "--tp", "16", "-s", "64")
    assert "2 ranks share a key/value head" in " ".join(here(capsys, "estimate", *shared).stdout.split())
