"""AdamW with two paged fp32 moments: bitsandbytes/optim/adamw.py, PagedAdamW32bit."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import fp32
from memcalc.optimizers.bitsandbytes import PAGED_FROM, BitsAndBytes

OPTIMIZER: Final = BitsAndBytes("paged-adamw", ("fused",), moments=2, kept_in=fp32, paged_from=PAGED_FROM)
