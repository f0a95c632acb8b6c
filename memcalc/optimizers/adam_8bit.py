"""Adam with two one-byte moments: bitsandbytes/optim/adam.py, Adam8bit. It keeps what AdamW8bit keeps."""

from __future__ import annotations

from typing import Final

from memcalc.core.dtypes import uint8
from memcalc.optimizers.bitsandbytes import BitsAndBytes

OPTIMIZER: Final = BitsAndBytes("adam-8bit", ("fused",), moments=2, kept_in=uint8)
