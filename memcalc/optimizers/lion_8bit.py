"""Lion with a one-byte moment: bitsandbytes/optim/lion.py, Lion8bit."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import uint8
from memcalc.optimizers.bitsandbytes import BitsAndBytes

OPTIMIZER: Final = BitsAndBytes("lion-8bit", ("fused",), moments=1, kept_in=uint8)
