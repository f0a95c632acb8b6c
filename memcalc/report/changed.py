"""The flags that a list of changes comes to, added to the options as they were given, and the setup that results.

Flags win over what was given; what neither names has its default under the new setup, as it would on the command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.errors import InputError
from memcalc.inputs.model import Model
from memcalc.inputs.options import check_options
from memcalc.optimizers import load_optimizer
from memcalc.setup.setup import Setup, resolve

if TYPE_CHECKING:
    from memcalc.inputs.options import Options
    from memcalc.report.remedies import Rung


class Changed(NamedTuple):
    """A setup after some changes, and what to add to the command for it."""

    flags: tuple[tuple[str, Any], ...]
    setup: Setup


def changed(given: Options, setup: Setup, model: Any, rungs: Iterable[Rung]) -> Changed | None:
    """`setup`, which `given` came to, with these changes; None where that is refused or is what it was.

    A step keeps its sequences: with fewer data-parallel ranks it has more micro-batches. With more GPUs it has as many as these
    need. The engine stays what it is unless a change names another one.
    """
    flags: dict[str, Any] = {}
    for rung in rungs:
        flags |= rung
    flags |= _batch(given, setup, flags)
    optimizer, implementation = flags.get("optimizer"), given.optimizer_implementation
    if optimizer is not None and implementation is not None:
        allowed = load_optimizer(optimizer).implementations
        if implementation not in allowed:
            flags.setdefault("optimizer_implementation", allowed[0])
    engine = flags.pop("engine", setup.engine)
    for named in ({}, {"engine": engine}):
        needed = {name: value for name, value in {**named, **flags}.items() if getattr(given, name) != value}
        after = _resolved(given, model, needed)
        if after is not None and after.engine == engine:
            return Changed(tuple(needed.items()), after) if after != setup else None
    return None


def _batch(given: Options, setup: Setup, flags: dict[str, Any]) -> dict[str, Any]:
    """Return what has to be said of the global batch, and of dp where that was given to be checked."""
    gpus, tp, pp, cp, micro_batch = (
        flags.get(name, getattr(setup, name)) for name in ("gpus", "tp", "pp", "cp", "micro_batch_size")
    )
    dp = gpus // (tp * pp * cp)
    if not dp:
        return {}
    out: dict[str, Any] = {} if given.dp in (None, dp) else {"dp": dp}
    unit, sequences = dp * micro_batch, setup.global_batch_size
    if given.global_batch_size is None:
        return out | ({"global_batch_size": sequences} if unit < sequences else {})
    if "gpus" in flags and sequences % unit:
        out["global_batch_size"] = -(-sequences // unit) * unit
    return out


def _resolved(given: Options, model: Any, flags: dict[str, Any]) -> Setup | None:
    """The setup of the options with these flags; None where it is refused."""
    try:
        options = check_options({**given._asdict(), **flags})
        return resolve(options, model if isinstance(model, Model) else None)
    except InputError:
        return None


def shown(flags: Iterable[tuple[str, Any]]) -> str:
    """Flags as they are written on the command line."""
    return " ".join(_flag(name.replace("_", "-"), value) for name, value in flags)


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"
