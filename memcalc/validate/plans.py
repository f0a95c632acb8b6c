# pyright: basic
"""Tensor parallelism with sequence parallelism by torch's own `parallelize_module` over transformers' models, as
torch's tutorial and torchtitan apply it to their Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def sequence_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Give each rank its part of the sequence between attention and MLP. `position_ids` have to be given."""
    _sequence_parallel(model, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))


def sequence_and_loss_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Apply `sequence_parallel` with logits that stay split. The step has to be under `loss_parallel()`."""
    split = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    _sequence_parallel(model, mesh, split)


def _sequence_parallel(model: Any, mesh: DeviceMesh, head: ColwiseParallel) -> None:
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "lm_head": head,
    }
    for name, style in linear_layers(model).items():
        plan[name] = ColwiseParallel() if style == "colwise" else RowwiseParallel(output_layouts=Shard(1))
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "self_attn":
            plan[name] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        elif last == "mlp":
            plan[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        elif last in ("q_norm", "k_norm"):
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif list(module.parameters(recurse=False)) and not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            plan[name] = SequenceParallel()
    apply(model, mesh, plan)


def linear_layers(model: Any) -> dict[str, str]:
    """Return the linear layers within the stack, each with the dim that transformers' plan splits: columns or rows."""
    styles: dict[str, str] = dict(model.tp_plan)
    out: dict[str, str] = {}
    for name, module in model.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            out[name] = styles[pattern]
    return out


def apply(model: Any, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    tied = model.config.tie_word_embeddings
    parallelize_module(model, mesh, plan)
    if tied:  # each module's style has made a parameter of its own
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
