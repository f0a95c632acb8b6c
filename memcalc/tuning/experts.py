"""Adapters of fused parameters, as peft makes them of the experts that transformers 5 keeps in one tensor each.

peft takes names of the layers that a checkpoint has for names of these parameters: `gate_proj` and `up_proj` together for
`gate_up_proj`, with twice the rank, and the router's `gate` for its weight. In each forward of the module an adapter of a
parameter is added to it: a merged copy of the whole parameter takes its place until the forward is done. Sources: peft
0.21.2, peft/tuners/lora/layer.py (ParamWrapper), peft/utils/transformers_weight_conversion.py (_convert_peft_config_moe);
torch/nn/utils/parametrize.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import add, cast, scale
from memcalc.core.ops.matmul import baddbmm, biased_baddbmm, mm
from memcalc.core.ops.shape import transpose, view
from memcalc.core.tensor import Autocast
from memcalc.families.base.module import BASE, Weight
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.tuning.default_targets import FUSED

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import Module
    from memcalc.inputs.model import Model

ALPHA: Final = 8
"""peft's own `lora_alpha`. A product is scaled by this over the rank, and nothing is multiplied where that is 1."""
_GATE_AND_UP: Final = "gate_up_proj"
_OF_MIXTRAL: Final = {"gate": "gate.weight", "w1": _GATE_AND_UP, "w3": _GATE_AND_UP, "w2": "down_proj"}
_OF_OTHERS: Final = {
    "gate": "gate.weight", "gate_proj": _GATE_AND_UP, "up_proj": _GATE_AND_UP, "down_proj": "down_proj",
}  # fmt: skip
_LIKE_MIXTRAL: Final = ("minimax", "minimax_m2", "mixtral")


class FusedAdapter(NamedTuple):
    """The adapter of one parameter: a matrix, or one matrix for each expert, (experts, out, in)."""

    parameter: str
    """The parameter's name in its module."""
    shape: tuple[Dim, ...]
    rank: int
    scaled: bool
    """True if the product of the adapter's matrices is multiplied with a number that is not 1."""

    @property
    def fan_in(self) -> Dim:
        return self.shape[-1]

    @property
    def fan_out(self) -> Dim:
        return self.shape[-2]

    @property
    def ranks(self) -> Dim:
        """Return the rank, all experts together."""
        rank = Dim("rank", self.rank)
        return rank if len(self.shape) == 2 else merge(self.shape[0], rank)

    def weights(self, path: str, layer: int | None, component: str, dtype: DType | None) -> Iterator[Weight]:
        """Yield the matrices of the adapter, whose wrapper is at `path`."""
        yield Weight(f"{path}.lora_A.default.weight", (self.ranks, self.fan_in), component, layer, dtype)
        yield Weight(f"{path}.lora_B.default.weight", (self.fan_out, self.ranks), component, layer, dtype)

    def delta(self, m: Module, own: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function that adds to the parameter what the matrices of the wrapper at `m` make."""
        down, up = (m / "lora_A.default").weight(), (m / "lora_B.default").weight()
        if len(self.shape) == 2:
            return partial(add, cast(scale(mm(up, down), "mul"), own.dtype))
        experts, rank = self.shape[0], Dim("rank", self.rank)
        rhs = view(down, experts, rank, self.fan_in)
        lhs = transpose(transpose(view(up, self.fan_out, rank, experts), 0, 2), 1, 2)
        return partial(_folded, lhs=cast(lhs, own.dtype), rhs=cast(rhs, own.dtype), scaled=self.scaled)


def _folded(own: Tensor, *, lhs: Tensor, rhs: Tensor, scaled: bool) -> Tensor:
    """Return `own + alpha · lhs @ rhs`, (experts, out, in), in the parameter's dtype whatever autocast says."""
    with Autocast(own.memory, None):
        return (baddbmm if scaled else biased_baddbmm)(own, lhs, rhs, "merged parameter")


class Merged:
    """A parameter with its adapter's part. It is computed when the module first asks for it, and kept."""

    def __init__(self, own: Tensor, delta: Callable[[Tensor], Tensor]) -> None:
        self._own, self._delta = own, delta
        self._value: Tensor | None = None
        _checked = delta(own)  # register_parametrization makes one, looks at its shape and dtype, and lets it go

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self._delta(self._own)
        return self._value


@contextmanager
def merged(m: Module, adapters: tuple[FusedAdapter, ...]) -> Generator[None]:
    """Put the merged parameters in the place of the module's own until a forward of `m` is done. Each adapter is a wrapper
    around the one before it; the last one begins."""
    run, innermost = m.run, f"{m.path}{f'.{BASE}' * len(adapters)}"
    wrappers = [type(m)(run, f"{m.path}{f'.{BASE}' * i}", m.layer) for i in range(len(adapters))]
    keys = [(f"{m.path}.{adapter.parameter}", m.layer) for adapter in adapters]
    try:
        for wrapper, adapter, key in zip(wrappers, reversed(adapters), reversed(keys), strict=True):
            own = run.weights[f"{innermost}.{adapter.parameter}", m.layer]
            run.merged[key] = Merged(own, adapter.delta(wrapper, own))
        yield
    finally:
        run.merged.clear()


def renamed(model_type: str) -> Mapping[str, str]:
    """Return the names of a checkpoint's layers, with those of the parameters that hold them; empty if none are fused."""
    if model_type not in FUSED:
        return {}
    return _OF_MIXTRAL if model_type in _LIKE_MIXTRAL else _OF_OTHERS


def fused_adapters(
    model: Model, names: tuple[str, ...], rank: int, targets: str
) -> Mapping[Place, tuple[FusedAdapter, ...]]:
    """Return the adapters of the parameters that `names` mean, by their module. Raises InputError where a parameter holds
    several layers, and only some of them are named; for a router with a module within it; and for a single expert."""
    found: dict[str, set[str]] = {}
    for old, new in renamed(model.model_type).items():
        if any(name == old or name.endswith(f".{old}") for name in names):
            found.setdefault(new, set()).add(old)
    fused = {old for old, new in renamed(model.model_type).items() if new == _GATE_AND_UP}
    missing = fused - found.get(_GATE_AND_UP, fused)
    if missing:
        why = f"peft adapts {' and '.join(sorted(fused))} of a {model.model_type} together, which are one parameter"
        refuse("lora_targets", targets, f"{why}; allowed: {', '.join(sorted(missing))} too")
    out: dict[Place, tuple[FusedAdapter, ...]] = {}
    weights = list(model.program.weights()) if found else []
    for weight in weights:
        own = next((new for new in found if weight.name.endswith(f".{new}")), None)
        if own is None:
            continue
        path, _, name = weight.name.rpartition(".")
        if any(other.name.startswith(f"{path}.") and other.name.count(".") > path.count(".") + 1 for other in weights):
            why = f"an adapter of {path.rpartition('.')[2]}, which has a module within it,"
            refuse("lora_targets", targets, f"{why} {NOT_YET}names of other layers")
        if len(weight.shape) == 3 and weight.shape[0].size == 1:
            refuse("lora_targets", targets, f"an adapter of a single expert {NOT_YET}names of other layers")
        several = len(fused) if own == _GATE_AND_UP else 1
        adapter = FusedAdapter(name, weight.shape, several * rank, rank != ALPHA)
        out[path, weight.layer] = (*out.get((path, weight.layer), ()), adapter)
    return out
