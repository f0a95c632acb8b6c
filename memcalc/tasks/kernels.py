"""The kernels of a preference task's run: transformers' own, with TRL's head in place of the logits and their loss. The
program puts the head there itself (`memcalc.tasks.program`)."""

from __future__ import annotations

from typing import Final

from memcalc.kernels import TRANSFORMERS, Kernels
from memcalc.tasks.fused_head import SOURCE

KERNELS: Final = Kernels((), f"{TRANSFORMERS.source}; {SOURCE}")
