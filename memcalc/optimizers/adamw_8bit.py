"""AdamW with two one-byte moments, and an fp32 maximum per block of 256: bitsandbytes/optim/adamw.py, AdamW8bit."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import uint8
from memcalc.optimizers.bitsandbytes import BitsAndBytes

OPTIMIZER: Final = BitsAndBytes("adamw-8bit", ("fused",), moments=2, kept_in=uint8)
