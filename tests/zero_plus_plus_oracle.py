"""What DeepSpeed really allocates and sends with ZeRO++: its own ZeRO-3, as in `deepspeed_oracle`, with these keys of its
configuration.

The CUDA quantiser has no CPU version. `Quantizer` stands in for it: its functions return tensors of the sizes and dtypes that
csrc/quantization/pt_binding.cpp allocates, full of zeros."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from deepspeed_oracle import RankMode, _step, configuration, ranks
from oracle import build
from per_op import CHECKPOINTS
from torch import Tensor

SIZES = {"int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "uint8": 1}


class Quantizer:
    """pt_binding.cpp without its kernels. Symmetric: a group has one fp32 number."""

    Symmetric = "symmetric"

    @staticmethod
    def quantize(values: Tensor, groups: int, bits: int, kind: str) -> tuple[Tensor, Tensor]:
        assert values.dtype is torch.float16  # read as __half
        scales = torch.zeros((groups,), dtype=torch.float32)  # (groups, 1) there, which a fake group cannot copy
        sizes = list(values.shape)
        sizes[-1] //= 1 if bits == 8 else 2
        return torch.zeros(sizes, dtype=torch.int8), scales

    @staticmethod
    def dequantize(codes: Tensor, scales: Tensor, groups: int, bits: int, kind: str) -> Tensor:
        sizes = list(codes.shape)
        sizes[-1] *= 1 if bits == 8 else 2
        return torch.zeros(sizes, dtype=torch.float16)

    @staticmethod
    def swizzle_quant(
        values: Tensor, groups: int, bits: int, kind: str, pipeline: int, nodes: int, per_node: int
    ) -> tuple[Tensor, Tensor]:
        scales = torch.zeros((groups, 1), dtype=torch.float32)
        return torch.zeros((values.numel() // (8 // bits),), dtype=torch.int8), scales

    @staticmethod
    def quantized_reduction(
        codes: Tensor, scales: Tensor, groups: int, own_groups: int, bits: int, kind: str, per_node: int
    ) -> tuple[Tensor, Tensor]:
        own = torch.zeros((own_groups, 1), dtype=torch.float32)
        sizes = list(codes.shape)
        sizes[-1] //= per_node
        return torch.zeros(sizes, dtype=torch.int8), own


@dataclass
class PlusPlusStep:
    """Bytes of a steady step on one rank, and its collectives: (kind, dtype, ranks of the group) -> calls and bytes of the full
    tensors."""

    resident: int
    forward: int
    backward: int
    step: int
    sent: dict[tuple[str, str, int], tuple[int, int]]


@contextlib.contextmanager
def stand_ins(per_node: int) -> Iterator[None]:
    """Within `ranks`: the quantiser, and a node's number of devices."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    with (
        patch.object(CUDAQuantizer, "quantizer_cuda_module", Quantizer),
        patch.object(CUDAQuantizer, "group_size_cache", {}),
        patch.object(coalesced_collectives, "quantizer_module", Quantizer),
        patch.object(type(get_accelerator()), "device_count", lambda _: per_node),
    ):
        yield


def plus_plus_step(
    config: dict[str, Any],
    *,
    gpus: int,
    per_node: int = 8,
    rank: int = 0,
    precision: str = "bf16",
    micro_batch_size: int = 1,
    seq_len: int = 16,
    micro_batches: int = 1,
    recompute: bool = False,
    frozen: tuple[str, ...] = (),
    steps: int = 3,
    **zero: Any,
) -> PlusPlusStep:
    """`engine(...)`, `engine.backward`, `engine.step`, `steps` times; the last is reported. `zero`: keys of zero_optimization;
    `frozen`: beginnings of the names of parameters that do not train."""
    import deepspeed

    mode = RankMode()
    with ranks(gpus, rank), stand_ins(per_node):
        model = build(config, "sdpa", torch.float32)
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))
        ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        with mode:
            for tensor in [*batch.values(), *model.parameters(), *model.buffers()]:
                mode.register(tensor)
            del tensor
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                config=configuration(3, precision, micro_batches, 0.0, zero),
            )
            for _ in range(steps):
                found = _step(mode, engine, lambda own: own(**batch).loss, micro_batches)
        engine.destroy()
    calls: Counter[tuple[str, str, int]] = Counter()
    payload: Counter[tuple[str, str, int]] = Counter()
    for (kind, dtype, elements, size), count in found.by_group.items():
        calls[kind, dtype, size] += count
        payload[kind, dtype, size] += count * elements * SIZES[dtype]
    return PlusPlusStep(
        found.resident, found.forward, found.backward, found.step, {key: (calls[key], payload[key]) for key in calls}
    )
