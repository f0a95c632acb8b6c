"""Falcon Mamba (models/falcon_mamba/modeling_falcon_mamba.py): Mamba with norms without weights on dt, B and C.

As Mamba, the path in plain torch, as runs without the packages mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, mean, power, rsqrt
from memcalc.families.base.module import Buffer, Module, module
from memcalc.families.base.support import Family, Support
from memcalc.families.mamba import Mamba, MambaConfig, SelectiveMixer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class FalconMambaConfig(MambaConfig):
    """The fields and defaults of models/falcon_mamba/configuration_falcon_mamba.py."""


class FalconMambaMixer(SelectiveMixer):
    """A module like FalconMambaMixer."""

    def buffers(self, path: str) -> Iterator[Buffer]:
        """Yield the norms' weights, which are buffers: only the fused kernels use them."""
        yield Buffer(f"{path}.dt_layernorm.weight", (self.inner,))
        yield Buffer(f"{path}.b_layernorm.weight", (self.state,))
        yield Buffer(f"{path}.c_layernorm.weight", (self.state,))

    def normalise(self, m: Module, time_step: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        time_step = self.norm(m / "dt_layernorm", time_step)
        b = self.norm(m / "b_layernorm", b)
        c = self.norm(m / "c_layernorm", c)
        return time_step, b, c

    @module
    def norm(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of FalconMambaWeightlessRMSNorm."""
        return cast(_norm(cast(x, fp32)), x.dtype)


class FalconMamba(Mamba):
    """The program of FalconMambaForCausalLM."""

    Config = FalconMambaConfig

    def make_mixer(self) -> FalconMambaMixer:
        return FalconMambaMixer(**self.mixer_sizes())

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("backbone.layers")

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        yield from self.mixer.buffers("mixer")


def _norm(x: Tensor) -> Tensor:
    return x * rsqrt(mean(power(x, 2)) + 1e-6)


FAMILY: Final = Family("falcon_mamba", FalconMamba, Support(tensor_parallel={}))
