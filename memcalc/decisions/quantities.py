"""The quantities that `memcalc fit` solves for: the values that each may have, and the setup with one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.errors import InputError
from memcalc.inputs.options import WHOLE, check_options, option_name, refuse
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

MOST_GPUS: Final = 1024
_GPUS_LIMIT: Final = 65_536
_MOST_LAYERS: Final = 10_000
_MOST_PARAMETERS: Final = 10**15
_TRIED: Final = 1024
"""The numbers that are tried to find the first valid ones: more than any layout's degrees ask for."""


class Asked(NamedTuple):
    """The options besides the quantity that is solved for."""

    model: Model | None
    params: int | str | None
    options: Mapping[str, Any]
    max_gpus: int


class Case(NamedTuple):
    """A setup, as `memcalc.estimate` takes it."""

    model: Model | None
    params: int | str | None
    options: Mapping[str, Any]

    def resolved(self) -> Setup:
        """Return the setup without an estimate. Raise InputError if the options alone refuse it."""
        return resolve(check_options(self.options), self.model)


class Quantity(NamedTuple):
    """A quantity and its valid values, those first that need least memory."""

    name: str
    values: Sequence[int]
    case: Callable[[int], Case]
    end: str
    """The reason in words why no value comes after the last one."""
    smallest: bool = False
    """True if the smallest value is wanted: more of it needs less memory."""


def micro_batch_size(asked: Asked) -> Quantity:
    """Return the micro-batch sizes: any, or with a global batch its divisors."""
    case = _with_option(asked, "micro_batch_size")
    setup = case(1).resolved()
    if asked.options.get("global_batch_size") is None:
        return Quantity(
            "micro-batch-size", range(1, WHOLE["micro_batch_size"][1] + 1), case, "no larger one is allowed"
        )
    each = setup.global_batch_size // setup.dp
    values = [n for n in range(1, each + 1) if each % n == 0]
    ranks = "the GPU" if setup.dp == 1 else f"each of {setup.dp} data-parallel ranks"
    end = f"--global-batch-size {setup.global_batch_size} gives {ranks} {each} sequence{'s' if each > 1 else ''} a step"
    return Quantity("micro-batch-size", values, case, end)


def _is_of_layers(asked: Asked) -> bool:
    return _model(asked, "seq-len").model_type == "layers"


def seq_len(asked: Asked) -> Quantity:
    """Return the lengths that the layout can share, up to the model's positions."""
    case = _with_option(asked, "seq_len")
    program = _model(asked, "seq-len").program
    if not program.has_sequence:
        why = "the input of --layers has no `seq`" if _is_of_layers(asked) else "the model is trained on images"
        raise InputError(f"--solve seq-len: {why}; allowed: micro-batch-size, gpus")
    most = program.max_seq_len or program.positions_limit
    values = _progression(case, most or WHOLE["seq_len"][1])
    end = "no longer one is allowed" if most is None else f"{_model(asked, '').name} is made for {most} positions"
    return Quantity("seq-len", values, case, end)


def gpus(asked: Asked) -> Quantity:
    """Return the numbers of GPUs that the degrees divide, above one node only whole nodes."""
    is_whole = isinstance(asked.max_gpus, int) and not isinstance(asked.max_gpus, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_whole or not 1 <= asked.max_gpus <= _GPUS_LIMIT:
        refuse("max_gpus", asked.max_gpus, f"allowed: a whole number from 1 to {_GPUS_LIMIT}")
    case = _with_option(asked, "gpus")
    options = check_options(asked.options)
    unit, node = options.tp * options.pp * options.cp, options.gpus_per_node
    counts = [n for n in range(unit, asked.max_gpus + 1, unit) if n <= node or n % node == 0]
    if not counts:
        refuse("max_gpus", asked.max_gpus, f"tp · pp · cp and nodes of {node} need more; allowed: at least {unit}")
    values = [n for n in reversed(counts) if _is_valid(case(n))]
    if not values:
        case(counts[-1]).resolved()
    return Quantity("gpus", values, case, "the layout allows no fewer", smallest=True)


def layers(asked: Asked) -> Quantity:
    """Return the numbers of layers of a model that is the given one but for its depth: in a pipeline, those that give equal
    stages their layers."""
    from memcalc.decisions.depth import with_layers

    model = _model(asked, "layers")
    _refuse_listed(asked, "layers", "--layers lists the layers themselves")
    made: dict[int, Model] = {}

    def case(count: int) -> Case:
        if count not in made:
            made[count] = with_layers(model, count)
        return Case(made[count], None, asked.options)

    options = check_options(asked.options)
    uneven = [n for n in (options.first_stage_layers, options.last_stage_layers) if n is not None]
    unit = max(1, options.pp - len(uneven)) * options.virtual_stages
    values = range(sum(uneven) + unit, _MOST_LAYERS + 1, unit)
    return Quantity("layers", values, case, f"{_MOST_LAYERS:,} layers are the most that are tried")


def _refuse_listed(asked: Asked, solved: str, why: str) -> None:
    """Raise InputError for a quantity that a network listed layer by layer does not have."""
    if asked.model is None or asked.model.model_type != "layers":
        return
    seq = ", seq-len" if asked.model.program.has_sequence else ""
    raise InputError(f"--solve {solved}: {why}; allowed: micro-batch-size, gpus{seq}")


def lora_rank(asked: Asked) -> Quantity:
    """Return the ranks of LoRA adapters."""
    _model(asked, "lora-rank")
    _refuse_listed(asked, "lora-rank", "adapters of a network that --layers lists are not modelled")
    case = _with_option(asked, "lora_rank")
    case(1).resolved()
    return Quantity("lora-rank", range(1, WHOLE["lora_rank"][1] + 1), case, "no larger rank is allowed")


def params(asked: Asked) -> Quantity:
    """Return the numbers of parameters whose model states are sized."""
    _refuse_listed(asked, "params", "sizes model states without a model, and --layers is one")
    if asked.model is not None:
        raise InputError("--solve params: sizes model states without a model; leave --model out")

    def case(count: int) -> Case:
        return Case(None, count, asked.options)

    return Quantity("params", range(1, _MOST_PARAMETERS + 1), case, "10^15 parameters are the most")


QUANTITIES: Final[Mapping[str, Callable[[Asked], Quantity]]] = {
    "micro-batch-size": micro_batch_size,
    "seq-len": seq_len,
    "gpus": gpus,
    "layers": layers,
    "params": params,
    "lora-rank": lora_rank,
}
"""The quantities by name."""


def _with_option(asked: Asked, field: str) -> Callable[[int], Case]:
    """Return the function that sets an option. Raise InputError if the option is given already."""
    if asked.options.get(field) is not None:
        given = asked.options[field]
        name = option_name(field)
        refuse(field, given, f"is what --solve {name.removeprefix('--')} searches for; allowed: leave it out")
    return lambda value: Case(asked.model, asked.params, {**asked.options, field: value})


def _model(asked: Asked, name: str) -> Model:
    if asked.model is None:
        raise InputError(f"--solve {name}: needs --model; with --params, allowed: --solve gpus")
    return asked.model


def _is_valid(case: Case) -> bool:
    try:
        case.resolved()
    except InputError:
        return False
    return True


def _progression(case: Callable[[int], Case], most: int) -> range:
    """Return the valid numbers up to `most`: they begin with the first valid number, at the distance of the first two.

    Raise the InputError of the last number that was tried if none is valid.
    """
    tried = range(1, min(most, _TRIED) + 1)
    found = list(islice((n for n in tried if _is_estimated(case, n)), 2))
    if not found:
        _estimate(case(tried[-1]))
    return range(found[0], most + 1, found[1] - found[0]) if len(found) == 2 else range(found[0], found[0] + 1)


def _is_estimated(case: Callable[[int], Case], value: int) -> bool:
    try:
        one = case(value)
        one.resolved()
        _estimate(one)
    except InputError:
        return False
    return True


def _estimate(case: Case) -> None:
    from memcalc.estimation.estimate import estimate

    estimate(case.model, params=case.params, **case.options)
