"""Figures of records, of which none is made here: what a record says is made up, to see what becomes of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

import memcalc
from memcalc.device.shown import TRAINER_ERROR
from memcalc.hardware.figures import FILE, Error, Figures, Fragmentation, Size, document_of, figures, parsed, using
from memcalc.report.table import print_report
from memcalc.units import MIB
from memcalc.validate.comparison import predicted_memory
from memcalc.validate.figures import figures_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4}  # fmt: skip
H200 = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory": str(2**37),
    "driver": "1",
    "cuda": "2",
    "torch": "3",
}


@pytest.fixture(autouse=True)
def none_recorded() -> Iterator[None]:
    with using(Figures()):
        yield


def case(device: int, *, ranks: int = 1, real: bool = False, reserved: int = 0, **options: Any) -> dict[str, Any]:
    """Measured as predicted, but so many bytes more on the device, and in torch's segments."""
    options |= {"model": LLAMA, "precision": "bf16", "seq_len": 16} | ({"gpus": ranks} if ranks > 1 else {})
    named = {name: value for name, value in options.items() if name != "model"}
    report = memcalc.estimate(LLAMA, gpu="h200", **named)
    rows = predicted_memory(report, "cuda", H200, real_ranks=real)
    rows |= {"reserved": rows["reserved"] + reserved, "device": rows["device"] + device + reserved}
    memory = [{"name": name, "predicted": 0, "measured": size} for name, size in rows.items()]
    return {
        "case": options,
        "backend": "cuda",
        "outcome": "measured",
        "environment": H200,
        "real_ranks": real,
        "memory": memory,
    }


def test_the_file_is_that_of_the_records() -> None:
    document = json.loads(FILE.read_text())
    assert document == document_of(parsed(document))
    assert document.keys() == {"schema_version", "sizes", "fragmentation", "errors"}


def test_nothing_recorded_is_nothing_used() -> None:
    assert figures_of([]) == Figures()
    assert figures_of([{"outcome": "out of memory", "backend": "cuda"}]) == Figures()
    assert figures() == Figures()


def test_the_context_is_the_median_of_what_is_outside_torch() -> None:
    context = 426 * MIB
    made = figures_of([case(1000), case(3000), case(2000), case(10**9, ranks=4, real=True)])
    sizes = {(size.name, size.ranks): size for size in made.sizes}
    assert sizes["CUDA context", 1].nbytes == context + 2000
    assert sizes["CUDA context", 1].source == (
        f"NVIDIA H200, driver 1, cuda 2, torch 3: 3 cases, {context + 1000} to {context + 3000} B"
    )
    assert sizes["NCCL communicator", 4].nbytes == 688 * 10**6 + 10**9 - 2000
    assert sizes["cuBLAS workspaces", 1].nbytes == 2 * 32 * MIB
    assert all(size.gpu == "h200" for size in made.sizes)


def test_ranks_that_were_not_there_have_no_nccl() -> None:
    made = figures_of([case(0), case(0, ranks=4)])
    assert {size.name for size in made.sizes} == {"CUDA context", "cuBLAS workspaces"}


def test_a_verdict_is_on_the_safe_side_of_what_was_measured() -> None:
    """More on the device than was predicted, where the context explains it, and where it does not."""
    assert [error.percent for error in figures_of([case(50 * MIB)]).errors] == [0]
    spread = figures_of([case(0), case(0), case(200 * MIB)])
    (error,) = spread.errors
    assert error.engine == "none"
    assert error.percent == 1  # 200 MiB of a quarter of 128 GiB
    (large,) = figures_of([case(0), case(0), case(2**34)]).errors
    assert large.percent == 50


def test_the_allocators_rules_stay_where_they_are_nearer() -> None:
    assert not figures_of([case(0)]).fragmentation
    assert not figures_of([case(0, reserved=300 * MIB)] * 4).fragmentation  # of so few a share is chance
    with_more = figures_of([case(0, reserved=300 * MIB)] * 5)
    (fragmentation,) = with_more.fragmentation
    assert fragmentation.share > 1
    with using(with_more):
        report = memcalc.estimate(LLAMA, precision="bf16", seq_len=16, gpu="h200")
        (row,) = (item for item in report.overheads if item.component == "reserved")
        assert row.basis == "measured"
        assert report.reserved % (2 * MIB) == 0


def test_estimates_use_them() -> None:
    made = Figures(
        (
            Size("CUDA context", "h200", 1, 600 * MIB, "measured there"),
            Size("cuBLAS workspaces", "h200", 1, 80 * MIB, "measured there"),
            Size("NCCL communicator", "h200", 8, 900 * MIB, "measured there"),
        ),
        (Fragmentation("deepspeed", 0.25, "measured there"),),
        (Error("deepspeed", 9, "measured there"), Error("ddp", 3, "measured there")),
    )
    options: dict[str, Any] = {"model": LLAMA, "seq_len": 16, "gpus": 8, "zero": 1}
    before = memcalc.estimate(**options, gpu="h200")
    with using(made):
        report, other = memcalc.estimate(**options, gpu="h200"), memcalc.estimate(**options, gpu="h100-80gb")
        assert report.margin == report.device * 9 // 100
        ddp = memcalc.estimate(LLAMA, seq_len=16, gpus=8, engine="ddp", gpu="h200")
        assert ddp.margin == ddp.device * TRAINER_ERROR // 100  # published runs were farther off
        assert {item.name for item in other.overheads if item.basis == "measured"} == {"fragmentation"}
        alike, unlike = (
            next(item for item in estimate.overheads if item.name == "CUDA context")
            for estimate in (other, memcalc.estimate(**options, gpu="a100-80gb"))
        )
        assert (alike.nbytes, alike.basis) == (600 * MIB, "assumed")
        assert "h200, with the same compute capability" in alike.formula
        assert (unlike.nbytes, unlike.basis) == (426 * MIB, "assumed")
    rows = {item.name: item for item in report.overheads}
    assert {name: item.nbytes for name, item in rows.items() if item.component == "device"} == {
        "CUDA context": 600 * MIB, "NCCL communicator": 900 * MIB,
    }  # fmt: skip
    assert rows["cuBLAS workspaces"].nbytes == 80 * MIB
    assert report.allocated - before.allocated == 16 * MIB
    assert 1.25 * report.allocated <= report.reserved < 1.25 * report.allocated + 2 * MIB
    text = io.StringIO()
    with using(made):
        print_report(report, rows=False, verbose=True, file=text)
    assert "+ fragmentation (measured)" in text.getvalue()
    assert "+ CUDA context, NCCL (measured)" in text.getvalue()
    measured = {item.name for item in report.overheads if item.basis == "measured"}
    assert measured == {"CUDA context", "NCCL communicator", "cuBLAS workspaces", "fragmentation"}
    assert report.peak == before.peak
