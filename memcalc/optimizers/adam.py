"""Adam: AdamW without weight decay, which is 0 by default in torch/optim/adam.py, so without a copy of the gradient."""

from __future__ import annotations

from typing import Final

from memcalc.optimizers.adamw import Adam

OPTIMIZER: Final = Adam("adam", ("foreach", "fused", "for-loop"))
