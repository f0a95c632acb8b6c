"""FSDP2's part of a weight: what is sharded of it, and in which dtype.

Of a quantised weight it shards the tensor of its codes, if that is of a floating-point dtype. accelerate leaves codes in uint8
out of FSDP2's units (`ignored_params`, accelerate/utils/fsdp_utils.py): they are whole on every rank. The scales are no
parameters (`Params4bit.quant_state`): they are whole on every rank too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dtypes import fp32
from memcalc.quantized.chosen import base_dtype_name
from memcalc.setup.setup import DTYPES

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.families.base.replacing import Packing
    from memcalc.setup.setup import Setup


def shape_in_unit(packing: Packing | None, shape: Shape) -> Shape | None:
    """Return the shape of what a unit has of a weight of this shape; None if the weight is in no unit."""
    if packing is None:
        return shape
    codes = packing.stored(shape)[0]
    return codes.shape if codes.dtype.is_floating_point else None


def sharded_dtype(setup: Setup) -> DType:
    """Return the dtype of the shards of what trains, and of the gradients that the optimizer gets."""
    return fp32 if setup.has_master_weights else setup.compute_dtype


def frozen_dtype(setup: Setup) -> DType:
    """Return the dtype of the shards of frozen weights. Beside a quantised base they stay as they were loaded: accelerate casts
    nothing then (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model)."""
    if setup.quantize == "none":
        return sharded_dtype(setup)
    return fp32 if setup.prepare_kbit_training else DTYPES[base_dtype_name(setup)]
