"""Adam: AdamW without its weight decay (torch/optim/adam.py, where that is 0 by default), so without a copy of the gradient."""

from __future__ import annotations

from typing import Final

from memcalc.optimizers.adamw import Adam

OPTIMIZER: Final = Adam("adam", ("foreach", "fused", "for-loop"))
