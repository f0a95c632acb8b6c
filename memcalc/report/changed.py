"""The flags of a list of changes, and the setup that results from adding these flags to the given options.

A flag replaces a given option. An option that is neither given nor changed has its default in the new setup, as on the
command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.errors import InputError
from memcalc.inputs.model import Model
from memcalc.inputs.options import check_options
from memcalc.optimizers import load_optimizer
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

if TYPE_CHECKING:
    from memcalc.inputs.options import Options
    from memcalc.report.remedies import Rung


class Changed(NamedTuple):
    """A setup after some changes, and the flags to add to the command for that setup."""

    flags: tuple[tuple[str, Any], ...]
    setup: Setup


def changed(given: Options, setup: Setup, model: Any, rungs: Iterable[Rung]) -> Changed | None:
    """Return `setup`, which was resolved from `given`, with the changes `rungs`; None if it is refused or stays the same.

    The sequences per step stay the same: with fewer data-parallel ranks there are more micro-batches. Only with more GPUs
    there can be more sequences, as many as the GPUs need. The engine stays the same unless a change names another.
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
    """Return the flags that the changes need for the global batch, and for dp if dp was given."""
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
    """Return the setup of the options with these flags; None if it is refused."""
    try:
        options = check_options({**given._asdict(), **flags})
        return resolve(options, model if isinstance(model, Model) else None)
    except InputError:
        return None


def shown(flags: Iterable[tuple[str, Any]]) -> str:
    """Return the flags as written on the command line."""
    return " ".join(_flag(name.replace("_", "-"), value) for name, value in flags)


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"
