# pyright: basic
"""The real optimizers: torch's, lion-pytorch's and bitsandbytes'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Module, Parameter

from memcalc.errors import InputError, one_line
from memcalc.tracing.description import place
from memcalc.tracing.modules import stacks

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup

PACKAGES = {"lion": "lion_pytorch", "apollo-adamw": "apollo_torch", "galore-adamw": "galore_torch"}
"""The packages of optimizers that are not torch's or bitsandbytes'."""
_OF_MATRICES = ("muon", "apollo-adamw", "galore-adamw")
BITSANDBYTES = {
    "adamw-8bit": "AdamW8bit",
    "adam-8bit": "Adam8bit",
    "lion-8bit": "Lion8bit",
    "paged-adamw": "PagedAdamW32bit",
    "paged-adamw-8bit": "PagedAdamW8bit",
    "paged-adam": "PagedAdam32bit",
    "paged-adam-8bit": "PagedAdam8bit",
    "paged-lion": "PagedLion32bit",
    "paged-lion-8bit": "PagedLion8bit",
}
"""The classes of bitsandbytes. For parameters on the CPU it pages nothing."""


def make(setup: Setup, groups: Sequence[Sequence[Any]], matrices: Sequence[Any] = ()) -> Any:
    """Return the setup's optimizer over groups of parameters; `matrices` are those that Muon takes.

    Raises InputError if its package is not installed.
    """
    implementation = setup.optimizer_implementation
    foreach: dict[str, Any] = {"foreach": implementation == "foreach"}
    flags: dict[str, Any] = {**foreach, "fused": implementation == "fused"}
    given: Any = [{"params": list(parameters)} for parameters in groups]
    makers: dict[str, Callable[[], Any]] = {
        "adamw": lambda: torch.optim.AdamW(given, **flags),
        "adam": lambda: torch.optim.Adam(given, **flags),
        "sgd": lambda: torch.optim.SGD(given, lr=1e-3, **flags),
        "sgd-momentum": lambda: torch.optim.SGD(given, lr=1e-3, momentum=0.9, **flags),
        "adafactor": lambda: torch.optim.Adafactor(given, **foreach),
        "lion": lambda: _package(setup).Lion(given),
        "muon": lambda: _muon([p for group in groups for p in group], matrices, flags),
    }
    if setup.optimizer in BITSANDBYTES:
        return _of_bitsandbytes(setup, given)
    if setup.optimizer == "apollo-adamw":
        return apollo(_package(setup), [p for group in groups for p in group], matrices)
    if setup.optimizer == "galore-adamw":
        return galore(_package(setup), [p for group in groups for p in group], matrices)
    return makers[setup.optimizer]()


def by_mesh(parameters: Iterable[Any]) -> list[list[Any]]:
    """Return groups of sharded parameters: those on different meshes cannot share a kernel
    (Trainer.create_optimizer)."""
    groups: dict[Any, list[Any]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    return list(groups.values())


def _package(setup: Setup) -> Any:
    try:
        return import_module(PACKAGES.get(setup.optimizer, "bitsandbytes"))
    except Exception as error:  # a package with compiled parts can fail in any way
        why = f"needs pip install 'memcalc-llm[optimizers]' to be run ({one_line(error)})"
        raise InputError(f"--optimizer {setup.optimizer}: {why}") from None


def _of_bitsandbytes(setup: Setup, given: Any) -> Any:
    with unset_fake_temporarily():  # it computes the values of its codes
        made = getattr(_package(setup).optim, BITSANDBYTES[setup.optimizer])(given)
    if "lion" in setup.optimizer:
        made.name2qmap.pop("udynamic", None)  # the table that it does not read stays on the CPU
    return made


class Both:
    """Two optimizers that step one after the other."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def state(self) -> dict[Any, Any]:
        return {k: v for optimizer in self.optimizers for k, v in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def _muon(parameters: Sequence[Any], matrices: Sequence[Any], flags: dict[str, Any]) -> Both:
    """Return torch's Muon, and the AdamW for the parameters that Muon does not take."""
    chosen = set(map(id, matrices))
    taken, rest = ([p for p in parameters if (id(p) in chosen) is kind] for kind in (True, False))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(taken)] if taken else []
    return Both([*optimizers, torch.optim.AdamW(rest, **flags)] if rest else optimizers)


def apollo(package: Any, parameters: Sequence[Any], matrices: Sequence[Any], every: int = 1) -> Any:
    """Return transformers' APOLLO over these matrices, which draws new projections `every` so many steps. In a run that is
    measured every step draws them, as the 200th of the default does."""
    chosen = set(map(id, matrices))
    taken, rest = ([p for p in parameters if (id(p) in chosen) is kind] for kind in (True, False))
    how = {
        "rank": 128,
        "proj": "random",
        "scale_type": "channel",
        "update_proj_gap": every,
        "scale": 1.0,
        "proj_type": "std",
    }
    return package.APOLLOAdamW([{"params": rest}, {"params": taken, **how}])


def galore(package: Any, parameters: Sequence[Any], matrices: Sequence[Any], every: int = 1) -> Any:
    """Return transformers' GaLore over these matrices, which decomposes gradients `every` so many steps: in a run that is
    measured in every step, as in the 200th of the default."""
    chosen = set(map(id, matrices))
    taken, rest = ([p for p in parameters if (id(p) in chosen) is kind] for kind in (True, False))
    how = {"rank": 128, "update_proj_gap": every, "scale": 0.25, "proj_type": "std"}
    return package.GaLoreAdamW([{"params": rest}, {"params": taken, **how}], no_deprecation_warning=True)


@contextlib.contextmanager
def one_seed(setup: Setup) -> Iterator[None]:
    """Let APOLLO draw every projection from the same seed within a block: under fake tensors the next seed is no number."""
    if setup.optimizer != "apollo-adamw":
        yield
        return
    _package(setup)
    projector: Any = import_module("apollo_torch.random_projector")
    original, projector.next_seed = projector.next_seed, lambda seed: seed
    try:
        yield
    finally:
        projector.next_seed = original


def matrices_of(module: Module) -> list[Parameter]:
    """Return the 2-D weights within the layers."""
    paths = stacks(module)
    return [p for name, p in module.named_parameters() if p.dim() == 2 and place(name, paths).layer is not None]


class MasterWeights:
    """An optimizer over fp32 copies of 16-bit weights: the mixed precision of the ZeRO paper (arXiv 1910.02054, section
    3.1)."""

    def __init__(self, parameters: Sequence[Parameter], matrices: Sequence[Parameter], setup: Setup) -> None:
        self.parameters = parameters
        self.masters = [Parameter(p.detach().float()) for p in parameters]
        of = dict(zip(map(id, parameters), self.masters, strict=True))
        self.optimizer = make(setup, [self.masters], [of[id(p)] for p in matrices])

    @property
    def copies(self) -> list[Parameter]:
        """Return the masters that are no fp32 weights themselves."""
        return [m for m, p in zip(self.masters, self.parameters, strict=True) if p.dtype is not torch.float32]

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)

    def zero_grad(self, *, set_to_none: bool) -> None:
        for parameter in (*self.masters, *self.parameters):
            parameter.grad = None


def make_optimizer(setup: Setup, module: Module) -> Any:
    """Return the optimizer over the module's weights, or over fp32 copies of them."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in matrices_of(module) if p.requires_grad] if setup.optimizer in _OF_MATRICES else []
    if setup.has_master_weights:
        return MasterWeights(parameters, matrices, setup)
    return make(setup, [parameters], matrices)


def on_the_cpu(optimizer: Any) -> list[torch.Tensor]:
    """Return the step counters. They are on the CPU even for parameters on a GPU, unless the optimizer is fused."""
    optimizers = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optimizer", optimizer)]
    if isinstance(optimizers[0], Both):
        optimizers = optimizers[0].optimizers
    return [
        state["step"]
        for one in optimizers
        if not (one.param_groups[0].get("fused") or one.param_groups[0].get("capturable"))
        for state in one.state.values()
        if isinstance(state.get("step"), torch.Tensor)
    ]
