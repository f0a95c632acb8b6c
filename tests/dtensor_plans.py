"""Tensor parallelism with torch's own `parallelize_module` over transformers' models: column- and row-parallel layers alone,
or, as `memcalc validate` runs it, with sequence parallelism between them."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from memcalc.validate.plans import apply, linear_layers, sequence_and_loss_parallel, sequence_parallel

__all__ = ["column_and_row_parallel", "sequence_and_loss_parallel", "sequence_parallel"]


def column_and_row_parallel(model: Any, mesh: DeviceMesh) -> None:
    """What is split is what transformers' plan splits; activations between the layers are whole on every rank."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name, style in linear_layers(model).items():
        plan[name] = ColwiseParallel() if style == "colwise" else RowwiseParallel()
    apply(model, mesh, plan)
