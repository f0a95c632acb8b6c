"""Megatron-Core's own pipeline schedules on one rank of a fake process group: which tensors between stages are alive when.

The chunks have one layer that keeps its input, so the tensors of the size of a hidden state are those of the layer and
those of the schedule: what was received, what waits to be sent, and what the last micro-batch left behind.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from oracle import LiveBytes
from records import on_record
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.testing._internal.distributed.fake_pg import FakeStore

SEQ, BATCH, HIDDEN = 8, 2, 512
NBYTES = SEQ * BATCH * HIDDEN * 2


class Moment(NamedTuple):
    """Tensors as large as a hidden state that are alive while one forward or backward of a chunk starts."""

    kind: str
    chunk: int
    alive: int


class _Layer(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Any) -> torch.Tensor:
        note("forward")
        ctx.save_for_backward(x)
        ctx.note = note
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.note("backward")
        return torch.empty_like(x), None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty((SEQ, BATCH, HIDDEN), dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.empty((1,))


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return torch.empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.empty(ctx.shape, dtype=torch.bfloat16)


class _Decoder(torch.nn.Module):
    """What of TransformerBlock a schedule sees: it has no layers that count micro-batches, and keeps its last input."""

    layers = ()
    input_tensor: torch.Tensor | None = None


class _Chunk(torch.nn.Module):
    def __init__(self, config: Any, index: int, first: bool, last: bool, note: Any) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.index, self.first, self.last, self.note = config, index, first, last, note
        self.model_type = ModelType.encoder_or_decoder
        self.decoder = _Decoder()
        self.weight = torch.nn.Parameter(torch.empty((1,)))

    def set_input_tensor(self, tensors: list[torch.Tensor]) -> None:
        self.decoder.input_tensor = tensors[0]

    def forward(self) -> torch.Tensor:
        x = _Embedding.apply(self.weight) if self.first else self.decoder.input_tensor
        out = _Layer.apply(x, lambda kind: self.note(kind, self.index))
        return _Loss.apply(out) if self.last else out


def _forward_step(_iterator: Any, model: _Chunk) -> Any:
    return model(), lambda loss: (loss, {})


@contextlib.contextmanager
def _pipeline(rank: int, ranks: int, chunks: int) -> Iterator[None]:
    import megatron.core.parallel_state as state

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    state.initialize_model_parallel(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        create_gloo_process_groups=False,
    )
    zeros = torch.zeros
    on_the_cpu = mock.patch("torch.zeros", lambda *size, **how: zeros(*size, **{**how, "device": "cpu"}))
    try:
        with (
            mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
            mock.patch("torch.cuda.synchronize", lambda: None),
            on_the_cpu,
        ):
            yield
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()


def _config(ranks: int, chunks: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=ranks * chunks, hidden_size=HIDDEN, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16,
        pipeline_model_parallel_size=ranks, pipeline_dtype=torch.bfloat16, deallocate_pipeline_outputs=True,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        overlap_p2p_comm=chunks > 1, batch_p2p_comm=chunks == 1,
    )  # fmt: skip


@on_record
def moments(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> tuple[int, list[Moment]]:
    """Of a steady step: the tensors that the step before has left, and every forward and backward in order."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    live, seen = LiveBytes(), list[Moment]()

    def note(kind: str, index: int) -> None:
        gc.collect(0)
        seen.append(Moment(kind, index, live.now // NBYTES))

    with _pipeline(rank, ranks, chunks):
        config = _config(ranks, chunks)
        last = chunks - 1
        model = [_Chunk(config, c, rank == 0 and c == 0, rank == ranks - 1 and c == last, note) for c in range(chunks)]
        left = 0
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            for _ in range(2):
                gc.collect()
                left = live.now // NBYTES
                seen.clear()
                step = get_forward_backward_func(ranks, chunks if chunks > 1 else None)
                step(
                    forward_step_func=_forward_step, data_iterator=[None] * chunks if chunks > 1 else None,
                    model=model if chunks > 1 else model[0], num_microbatches=micro_batches, seq_length=SEQ,
                    micro_batch_size=BATCH,
                )  # fmt: skip
    return left, seen
