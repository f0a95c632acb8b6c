"""Lion with a paged fp32 moment: bitsandbytes/optim/lion.py, PagedLion32bit."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import fp32
from memcalc.optimizers.bitsandbytes import PAGED_FROM, BitsAndBytes

OPTIMIZER: Final = BitsAndBytes("paged-lion", ("fused",), moments=1, kept_in=fp32, paged_from=PAGED_FROM)
