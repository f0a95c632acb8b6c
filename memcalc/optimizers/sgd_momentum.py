"""SGD with momentum: torch/optim/sgd.py."""

from __future__ import annotations

from typing import Final

from memcalc.optimizers.sgd import Sgd

OPTIMIZER: Final = Sgd("sgd-momentum", ("foreach", "fused", "for-loop"), momentum=True)
