"""AdamW with two paged one-byte moments: bitsandbytes/optim/adamw.py, PagedAdamW8bit."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import uint8
from memcalc.optimizers.bitsandbytes import PAGED_FROM, BitsAndBytes

OPTIMIZER: Final = BitsAndBytes("paged-adamw-8bit", ("fused",), moments=2, kept_in=uint8, paged_from=PAGED_FROM)
