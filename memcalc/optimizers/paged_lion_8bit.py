"""Lion with a paged one-byte moment: bitsandbytes/optim/lion.py, PagedLion8bit."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import uint8
from memcalc.optimizers.bitsandbytes import PAGED_FROM, BitsAndBytes

OPTIMIZER: Final = BitsAndBytes("paged-lion-8bit", ("fused",), moments=1, kept_in=uint8, paged_from=PAGED_FROM)
