"""The backend for GPUs over CPU tensors, with the functions that it asks of torch.cuda answered by a count of live storages."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

import memcalc
from memcalc.report.comparison import print_comparison
from memcalc.tracing.realism import collected_by_hand
from memcalc.validate import cuda, deepspeed, engines, place
from memcalc.validate.attention_kernels import as_on_cuda
from memcalc.validate.comparison import Comparison, Measured
from memcalc.validate.live import Live, resizing
from memcalc.validate.reference import Job, build, make_batch, saved_by_hooks
from memcalc.validate.run import is_out_of_memory

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301,
}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
WORKSPACES = 2 * 8519680
FREE = 5 * 2**20


class StandIn:
    """torch.cuda's functions over a count of bytes, in blocks of 512 B at its highest."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.workspaces = WORKSPACES
        self.trace: list[dict[str, Any]] = []
        self.recording = False

    def memory_stats(self) -> dict[str, int]:
        return {
            "requested_bytes.all.current": self.live.now + self.workspaces,
            "requested_bytes.all.peak": self.live.highest + WORKSPACES,
        }

    def begin(self) -> None:
        self.workspaces = WORKSPACES  # a step has made them anew
        self.live.begin()

    def clear(self) -> None:
        self.workspaces = 0

    def max_memory_allocated(self) -> int:
        return -(-(self.live.highest + WORKSPACES) // 512) * 512

    def max_memory_reserved(self) -> int:
        return -(-(self.live.highest + WORKSPACES) // 2**21) * 2**21

    def record(self, enabled: str | None, **named: Any) -> None:
        assert named.get("context") is None
        self.recording = enabled is not None
        if enabled is not None:
            assert named["clear_history"]
            self.trace = []

    def snapshot(self) -> dict[str, Any]:
        assert self.recording
        assert self.workspaces  # as in any step
        self.trace.append({"action": "alloc", "addr": len(self.trace), "size": 8})
        return {"device_traces": [self.trace]}


class Here:
    """In the place of a GPU."""

    name = "a CPU"
    context = 3 * 2**20

    def used(self) -> int:
        return FREE

    def environment(self) -> dict[str, str]:
        return {"gpu": self.name, "compute_capability": "8.0", "memory": str(2**34)}


def uncounted(function: Any) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **named)

    return call


@contextlib.contextmanager
def on_the_cpu() -> Iterator[Live]:
    live, mesh_of = Live(), cuda.mesh_of
    stand_in = StandIn(live)

    def left_out(mesh: Any) -> Any:
        live.leave_out(mesh._rank_map)
        return mesh

    with pytest.MonkeyPatch.context() as patch, resizing(live), collected_by_hand():
        for name in ("memory_stats", "max_memory_allocated", "max_memory_reserved"):
            patch.setattr(torch.cuda, name, getattr(stand_in, name))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", stand_in.begin)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", stand_in.clear, raising=False)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda.memory, "_snapshot", stand_in.snapshot)
        patch.setattr(torch.cuda.memory, "_record_memory_history", stand_in.record)
        patch.setattr(cuda, "DEVICE", "cpu")
        patch.setattr(cuda, "_TIMED_STEPS", 1)
        patch.setattr(cuda, "place", Here)
        patch.setattr(DeviceMesh, "__init__", uncounted(DeviceMesh.__init__))  # its ranks are a tensor on the CPU
        patch.setattr(cuda, "mesh_of", uncounted(lambda *args: left_out(mesh_of(*args))))
        patch.setattr(engines, "share_experts", uncounted(engines.share_experts))
        with live:
            yield live


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed", "global_batch_size": 3},
        {"precision": "fp32", "recompute": "full", "attention": "eager"},
        {"gpus": 8, "zero": 2, "engine": "fsdp2", "global_batch_size": 16},
        {"gpus": 3, "engine": "ddp", "global_batch_size": 6},
        {"gpus": 4, "zero": 3, "tp": 2, "global_batch_size": 4},
        {"gpus": 4, "zero": 3, "tp": 2, "sequence_parallel": True, "cross_entropy": "vocab-parallel"},
        {"gpus": 4, "zero": 3, "pp": 2, "pp_rank": 1, "global_batch_size": 8},
        {
            "gpus": 3,
            "zero": 2,
            "pp": 3,
            "pp_rank": 1,
            "global_batch_size": 4,
            "model": LLAMA | {"num_hidden_layers": 3},
        },
        {"gpus": 4, "zero": 3, "ep": 2, "model": MIXTRAL},
        {"gpus": 4, "zero": 3, "cp": 2, "engine": "fsdp2", "global_batch_size": 4},
    ],
)
def test_every_row_is_what_a_gpu_without_rounding_would_show(options: dict[str, Any]) -> None:
    report = memcalc.estimate(**{"model": LLAMA, "seq_len": 32, "optimizer_implementation": "fused"} | options)
    with as_on_cuda() if report.setup.cp > 1 else contextlib.nullcontext(), on_the_cpu():
        measured = cuda.measure(report)
    comparison = Comparison(report, measured, "cuda")
    tensors = [row for row in comparison.memory if row.name not in ("allocated", "reserved", "context", "device")]
    assert [(row.name, row.predicted) for row in tensors] == [(row.name, row.measured) for row in tensors]
    sent = comparison.communication
    assert bool(sent) is (report.setup.gpus > 1)
    assert [(row.name, row.predicted) for row in sent] == [(row.name, row.measured) for row in sent]
    assert [row["name"] for row in comparison.to_dict()["communication"]] == [row.name for row in sent]
    rows = {row.name: row.measured for row in comparison.memory}
    assert rows["allocated"] == -(-rows["peak"] // 512) * 512
    assert (rows["context"], rows["device"]) == (3 * 2**20, FREE)
    assert ("saved_activations by hooks" in rows) is (report.setup.gpus == 1 and report.setup.recompute == "none")
    assert measured.history is not None
    phases = [phase["phase"] for phase in measured.history["phases"]]
    if report.setup.pp == 1:
        assert phases == ["forward", "backward"] * report.setup.micro_batches + ["step"]
    text = io.StringIO()
    print_comparison(comparison, text)
    assert "the allocator's history of a step" in text.getvalue()
    assert ("saved_activations" in text.getvalue()) is (report.setup.pp == 1)
    assert ("gradients in step" in text.getvalue()) is (report.setup.engine == "fsdp2")
    by_kernel = () if report.setup.attention == "eager" else ("flash",)
    assert measured.attention == tuple(comparison.to_dict()["attention"]) == by_kernel
    assert ("attention by flash" in text.getvalue()) is bool(by_kernel)
    assert measured.seconds is not None
    assert 0 < measured.seconds < 30
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("zero", [1, 2])
def test_ranks_of_deepspeed_leave_nothing_to_one_another(zero: int) -> None:
    """Several are run in this process, and the highest peaks taken."""
    report = memcalc.estimate(LLAMA, engine="deepspeed", gpus=4, zero=zero, seq_len=32, reduce_bucket_size=100_000)
    assert len(deepspeed.ranks_to_run(report.setup, report.model)) == 3
    with deepspeed.on_the_cpu(), on_the_cpu() as live:
        comparison = Comparison(report, cuda.measure(report), "cuda")
        gc.collect()
        assert live.now == 0
    rows = [row for row in comparison.memory if row.name not in ("allocated", "reserved", "context", "device")]
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]
    assert {row.name for row in rows} >= {"parameters", "optimizer_states", "saved_activations"}
    sent = comparison.communication
    assert {row.name for row in sent} >= {"all_reduce over 4: calls", "all_reduce over 4: payload"}
    assert [(row.name, row.predicted) for row in sent] == [(row.name, row.measured) for row in sent]


def test_blocks_and_segments_are_the_most_of_all_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase forgets the peaks of the last one, and the allocator may have given segments back."""
    peaks = {"memory_allocated": 0, "memory_reserved": 0}
    for name in peaks:
        monkeypatch.setattr(torch.cuda, f"max_{name}", lambda name=name: peaks[name])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"requested_bytes.all.peak": 7})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: peaks.update(memory_allocated=3, memory_reserved=4)
    )
    allocator = cuda.Allocator()
    allocator.begin()
    peaks.update(memory_allocated=60, memory_reserved=80)
    allocator.begin()
    assert allocator.highest == 7
    assert (allocator.allocated, allocator.reserved) == (60, 80)


def test_ranks_time_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that steps more often than the others would wait for them for ever."""
    steps: list[int] = []
    job = Job([], None, {}, lambda enter: steps.append(1) or 0)
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: tensor.fill_(4))
    assert cuda._seconds(job) > 0
    assert len(steps) == 4


def test_of_real_ranks_the_reported_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's second stage, one of those that share sequences, and the highest peaks of DeepSpeed's."""

    def measured(rank: int) -> Measured:
        return Measured(1, 1, 1, None, 100 - rank, 90 + rank, 50 + rank, {("send", 2): (1, rank)}, {"rank": str(rank)})

    def gather(everyone: list[Any], _: Any) -> None:
        everyone[:] = map(measured, range(len(everyone)))

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    stage = memcalc.estimate(LLAMA, gpus=8, tp=2, pp=2, pp_rank=1, zero=3, seq_len=32, global_batch_size=4)
    assert cuda.of_reported(measured(0), stage) == measured(4)
    shared = memcalc.estimate(LLAMA, gpus=8, cp=2, tp=2, engine="fsdp2", zero=3, seq_len=32)
    assert cuda.of_reported(measured(0), shared) == measured(2 * (shared.rank.cp or 0))
    zero = memcalc.estimate(LLAMA, gpus=4, engine="deepspeed", zero=2, seq_len=32)
    made = cuda.of_reported(measured(0), zero)
    assert (made.forward, made.backward, made.step, made.environment["rank"]) == (100, 93, 53, "0")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hooks_are_shown_what_is_saved(precision: str, attention: str) -> None:
    report = memcalc.estimate(LLAMA, precision=precision, attention=attention, seq_len=24, micro_batch_size=2)
    module = build(report.setup, report.model, LLAMA)
    job = cuda.wrapped(report.setup, module, make_batch(report.setup, module.config), None, None)
    assert saved_by_hooks(report.setup, job) == report.total("saved_activations")
    assert all(parameter.grad is None for parameter in module.parameters())


def test_what_torch_raises_when_memory_is_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    )
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("CUDA driver error: out of memory"))
    assert is_out_of_memory(
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
        )
    )
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: unspecified launch failure\nout of memory is another"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_names_that_torch_has() -> None:
    assert callable(torch.cuda.memory._snapshot)
    assert callable(torch.cuda.memory._record_memory_history)
    assert place.place.__wrapped__ is not None
