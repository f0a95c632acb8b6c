"""The lines of a comparison, and which of their cells are the best."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.decisions.compare import Compared
from memcalc.decisions.compare_rows import Line, head_lines, refusals, shared_settings, unknown_times, value_lines
from memcalc.units import show_bytes


def lines(compared: Compared) -> dict[str, Line]:
    return {line.label: line for line in value_lines(compared)}


@pytest.fixture(scope="module")
def stages() -> Compared:
    """ZeRO stages of DeepSpeed, and Megatron, which has no second one."""
    return memcalc.compare("llama-7b", gpus=8, zero=[1, 2], engine=["deepspeed", "megatron"], gpu="a100-80gb", price=2)


def test_the_peak_is_the_sum_of_the_components_above_it() -> None:
    compared = memcalc.compare("llama-7b", gpus=[8, 16], zero=3)
    labels = list(lines(compared))
    assert labels[labels.index("peak") - 1] == "temporaries"
    for number, column in enumerate(compared.columns):
        assert column.report is not None
        sizes = column.report.to_dict()["memory"]["at_peak"]
        shown = [lines(compared)[name.replace("_", " ")].cells[number] for name in sizes]
        assert shown == [show_bytes(size) for size in sizes.values()]


@pytest.mark.parametrize(
    ("label", "read", "best"),
    [
        ("peak", lambda report: report.peak, min),
        ("allocated", lambda report: report.allocated, min),
        ("device", lambda report: report.device, min),
        ("to spare", lambda report: report.headroom, max),
        ("wire", lambda report: sum(c.wire for c in report.collectives), min),
        ("time of a step", lambda report: report.time.seconds, min),
        ("MFU", lambda report: report.time.mfu, max),
        ("tokens/s per GPU", lambda report: report.time.tokens_per_second, max),
    ],
)
def test_the_best_is_marked(stages: Compared, label: str, read: Any, best: Any) -> None:
    values = [None if column.report is None else read(column.report) for column in stages.columns]
    known = [value for value in values if value is not None]
    marked = {i for i, value in enumerate(values) if value == best(known)} if len(set(known)) > 1 else set[int]()
    assert lines(stages)[label].best == marked


def test_components_of_different_moments_have_no_best(stages: Compared) -> None:
    """DeepSpeed's ZeRO-1 has no saved activations at its peak, the end of backward, and saves as many as ZeRO-2."""
    found = lines(stages)
    assert len(set(found["saved activations"].cells)) > 1
    for component in ("parameters", "gradients", "optimizer states", "saved activations", "buffers", "temporaries"):
        assert not found[component].best
    assert found["peak"].best


def test_equal_values_have_no_best() -> None:
    compared = memcalc.compare("llama-7b", gpus=8, zero=3, gpu="h100-80gb", clip_grad_norm=False, pp_rank=[None, 0])
    assert not any(line.best for line in value_lines(compared))


def test_a_step_that_does_not_fit_is_never_the_fastest() -> None:
    compared = memcalc.compare("llama-7b", gpus=8, zero=3, micro_batch_size=[1, 2, 16], gpu="a100-80gb")
    assert [column.report.fits for column in compared.columns if column.report] == [True, True, False]
    mfu = lines(compared)["MFU"]
    assert mfu.best == {1}
    assert float(mfu.cells[2].rstrip("%")) > float(mfu.cells[1].rstrip("%"))


def test_what_is_shared_is_said_once(stages: Compared) -> None:
    assert shared_settings(stages)[:3] == ["llama-7b", "gpus 8", "gpu a100-80gb"]
    heads = [line.label for line in head_lines(stages)]
    assert heads[:2] == ["zero", "engine"]
    assert not set(heads) & {part.rsplit(" ", 1)[0] for part in shared_settings(stages)}
    assert {"kernels", "attention"} <= set(heads)


def test_a_refused_column_has_a_line_and_no_numbers(stages: Compared) -> None:
    (line,) = refusals(stages)
    assert line.startswith("refused: zero 2 · engine megatron: --zero 2: ")
    assert lines(stages)["verdict"].cells[3] == "refused"
    assert lines(stages)["peak"].cells[3] == "-"
    without = memcalc.compare("llama-7b", gpus=8, zero=[1, 2], engine=["deepspeed", "megatron"])
    assert lines(without)["verdict"].cells == ("-", "-", "-", "refused")


def test_lines_of_what_is_not_known_are_left_out() -> None:
    assert not {"verdict", "time of a step", "cost of a step", "to spare"} & set(
        lines(memcalc.compare("gpt2", seq_len=[64, 128]))
    )
    states = lines(memcalc.compare(params=["7B", "70B"], gpu="h100-80gb"))
    assert not {"payload", "wire", "MFU"} & set(states)
    assert states["verdict"].cells == ("does not fit", "does not fit")
    assert "cost of a step" not in lines(memcalc.compare("gpt2", seq_len=[64, 128], gpu="t4"))


def test_why_a_time_is_not_known_is_said() -> None:
    compared = memcalc.compare("llama-7b", gpus=8, zero=3, gpu=["80GB", "h100-80gb"])
    (line,) = unknown_times(compared)
    assert line.startswith("time not known: gpu 80GB: only the memory of a GPU of 80 GB is known")
    assert lines(compared)["time of a step"].cells[0] == "-"
    assert unknown_times(memcalc.compare(params=["7B", "70B"], gpu="h100-80gb")) == []


def test_images_are_no_tokens() -> None:
    compared = lines(memcalc.compare("resnet-50", micro_batch_size=[1, 2], gpu="h100-80gb", price=1))
    assert "cost of a step" in compared
    assert not {"tokens/s per GPU", "cost of 10^9 tokens"} & set(compared)
