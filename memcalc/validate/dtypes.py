"""torch's dtypes by memcalc's."""

from __future__ import annotations

import torch

from memcalc.core.dtypes import DType, bf16, fp16, fp32

DTYPES: dict[DType, torch.dtype] = {fp32: torch.float32, bf16: torch.bfloat16, fp16: torch.float16}
