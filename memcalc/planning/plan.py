"""`memcalc.plan`: the best layouts of a model on some GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.errors import InputError, nearest, one_line
from memcalc.formats.given import with_files
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import SCHEDULE_NAMES, WHOLE, Options, check_options, option_name
from memcalc.planning.clusters import gpu_counts, gpu_names
from memcalc.planning.evaluation import Evaluator
from memcalc.planning.layouts import ENGINES, LIMITS, ON_REQUEST, Layout, Space
from memcalc.planning.result import Plans, plans_of
from memcalc.planning.search import Search
from memcalc.planning.target import OBJECTIVES, Target, positive, prices_of
from memcalc.planning.workers import workers
from memcalc.setup.generation_checks import refuse_generation
from memcalc.tasks.tasked import tasked

if TYPE_CHECKING:
    from memcalc.planning.search import Progress

LIMITED: Final = ("tp", "pp", "cp", "ep", "virtual_stages", "micro_batch_size")
"""The options whose largest number `--max-...` limits."""
_UNBOUNDED: Final = ("data-parallel", "parameter-server", "colossalai")
"""The engines that the search has no bounds for."""
_NO_AXES: Final = ("gpus", "gpu", "dp", "pp_rank")
"""The options that are no part of `fixed`."""


class Goal(NamedTuple):
    """The goal of a plan, as given."""

    tokens: Any = None
    days: Any = None
    price: Any = None
    budget: Any = None
    objective: str | None = None


def plan(
    model: str | os.PathLike[str] | Mapping[str, Any] | Model | None = None,
    *,
    gpu: Any,
    gpus: Any,
    tokens: Any = None,
    days: Any = None,
    price: Any = None,
    budget: Any = None,
    objective: str | None = None,
    top: int = 5,
    jobs: int | None = 1,
    progress: Progress | None = None,
    **options: Any,
) -> Plans:
    """Return the best layouts of one training step on some GPUs.

    Give `model` as for `load_model`. `gpu`: a name, or several; `gpus`: a number, or a range "8..512". `options` are those of
    `memcalc.estimate`: each given one is fixed, the others of a layout are searched; `max_tp`, `max_pp`, `max_cp`, `max_ep`,
    `max_virtual_stages`, `max_micro_batch_size` limit the search. `tokens`, `days`, `price`, `budget`, `objective` (time, cost,
    gpus) say what for. `top`: the number of plans; `jobs`: the processes, None for one on each core. Raise InputError with one
    line that says what is wrong.
    """
    start = monotonic()
    places = {name: value for name, value in (("gpu", gpu), ("gpus", gpus)) if value is not None}
    model, options, _ = with_files(model, {**options, **places})
    gpu, gpus = options.pop("gpu", None), options.pop("gpus", None)
    most, fixed = limits_of(options)
    names, counts = gpu_names(gpu), gpu_counts(gpus, int(options.get("gpus_per_node") or 8))
    goal = _checked(Goal(tokens, days, price, budget, objective), names)
    top = _whole("top", top, 1, 1000)
    count = _whole("jobs", (os.cpu_count() or 1) if jobs is None else jobs, 1, 4096)
    if model is None:
        raise InputError("--model: is needed; as in: memcalc plan llama-7b --gpu h100-80gb --gpus 8")
    loaded = load_model(model)
    loaded.check_step()
    base = base_of(fixed, loaded)
    refuse_generation(base, "memcalc plan")
    loaded = tasked(loaded, base)
    target = _target(goal, base, len(names) * len(counts))
    given = {**fixed, "seq_len": base.seq_len, "global_batch_size": base.global_batch_size}
    evaluator = Evaluator(loaded, base, given)
    team = workers(evaluator, count)
    space = Space(fixed, most, loaded.layers, loaded.program.routed[1], base.global_batch_size or 1, base.gpus_per_node)
    layouts = [(name, number) for number in counts for name in names]

    def every() -> Any:
        for name, number in layouts:
            yield from space.degrees(name, number)

    search = Search(target, team, top, progress)
    try:
        search.run(every())
        _check_any(search, base, counts)
        missing = None
        if search.complete and not search.found and search.counts.misses:
            again = Search(target.without_limits(), team, 1)
            again.run(every())
            missing = again.found[0] if again.found else None
        return plans_of(search, evaluator, layouts, missing, monotonic() - start)
    finally:
        team.close()


def limits_of(options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the largest numbers of the axes, and the other options."""
    most = dict(LIMITS)
    fixed: dict[str, Any] = {}
    for name, value in options.items():
        if not name.startswith("max_") or name in Options._fields:
            if value is not None:
                fixed[name] = _named(name, value)
            continue
        axis = name.removeprefix("max_")
        if axis not in LIMITED:
            close = nearest(name, [f"max_{one}" for one in LIMITED])
            hint = f"; did you mean {option_name(close[0])}?" if close else ""
            raise InputError(f"{option_name(one_line(name))}: unknown option{hint}")
        if value is not None:
            most[axis] = _whole(name, value, *WHOLE[axis])
    return most, fixed


def _named(name: str, value: Any) -> Any:
    """Return a value by its first name: some schedules have two."""
    return SCHEDULE_NAMES.get(value, value) if name == "schedule" and isinstance(value, str) else value


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"{option_name(name)} {one_line(value)}: allowed: a whole number from {low} to {high}")
    return value


def base_of(fixed: Mapping[str, Any], model: Model) -> Options:
    """Return the options that all layouts have. A step of a fixed size makes their times comparable."""
    for name in _NO_AXES:
        if name in fixed:
            raise InputError(
                f"{option_name(name)} {one_line(fixed[name])}: the search decides it; allowed: leave it out"
            )
    base = check_options(fixed)
    if base.engine in _UNBOUNDED:
        raise InputError(f"--engine {base.engine}: {_not_searched(f'--engine {base.engine}')}")
    if base.tp_dims != "1":
        raise InputError(f"--tp-dims {base.tp_dims}: {_not_searched(f'--tp-dims {base.tp_dims}')}")
    if base.engine == "megatron" and (base.freeze is not None or base.lora_rank):
        why = "with frozen weights memcalc plan has no bounds for Megatron's layouts"
        raise InputError(
            f"--engine megatron: {why}; allowed: --engine deepspeed, fsdp2, or memcalc estimate --engine megatron"
        )
    if base.global_batch_size is None:
        why = "is needed, so that the steps of all layouts are alike; as in: --global-batch-size 256"
        raise InputError(f"--global-batch-size: {why}")
    seq_len = base.seq_len if base.seq_len is not None else min(2048, model.program.max_seq_len or 2048)
    return base._replace(seq_len=seq_len if model.program.has_sequence else None)


def _not_searched(given: str) -> str:
    """Return why an engine cannot be planned with, what can be, and what takes the options that are given."""
    engines = ", ".join((*ENGINES, *ON_REQUEST))
    return f"memcalc plan has no bounds for this engine's layouts; allowed: --engine {engines}, or memcalc estimate {given}"


def _checked(goal: Goal, gpus: tuple[str, ...]) -> Goal:
    """Return a goal in numbers, and the price of each GPU by name. Raise InputError for a part that is wrong by itself."""
    from memcalc.units import parse_count

    tokens = parse_count(goal.tokens) if isinstance(goal.tokens, str) else goal.tokens
    if goal.tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise InputError(f"--tokens {one_line(goal.tokens)}: allowed: a whole number, or one like 300B, 15T")
    if goal.objective is not None and goal.objective not in OBJECTIVES:
        raise InputError(f"--objective {one_line(goal.objective)}: allowed: {', '.join(OBJECTIVES)}")
    days = None if goal.days is None else positive("days", goal.days)
    budget = None if goal.budget is None else positive("budget", goal.budget)
    return Goal(tokens, days, prices_of(goal.price, gpus), budget, goal.objective)


def _target(goal: Goal, base: Options, clusters: int) -> Target:
    """Return the target of a checked goal. Raise InputError for a part of it without what it needs."""
    if goal.days is not None and goal.tokens is None:
        raise InputError(f"--days {goal.days:g}: needs --tokens, what is to be trained on in these days")
    if goal.budget is not None and goal.price is None:
        raise InputError(f"--budget {goal.budget:g}: needs --price, that of one GPU's hour; no price is built in")
    if goal.budget is not None and goal.tokens is None:
        raise InputError(f"--budget {goal.budget:g}: needs --tokens, what is to be trained on with it")
    objective = goal.objective
    if objective is None:
        sought = clusters > 1 and goal.days is not None
        objective = ("cost" if goal.price else "gpus") if sought else "time"
    if objective == "cost" and goal.price is None:
        raise InputError("--objective cost: needs --price, that of one GPU's hour; no price is built in")
    per_step = (base.global_batch_size or 1) * (base.seq_len or 1)
    return Target(objective, per_step, goal.tokens, goal.days, goal.price, goal.budget)


def _check_any(search: Search, base: Options, counts: tuple[int, ...]) -> None:
    """Raise InputError if every layout is refused: with the reason of most, or that of the global batch."""
    counted = search.counts
    if not search.complete or not counted.enumerated or counted.invalid.total() < counted.enumerated:
        return
    many, step = counted.enumerated, base.global_batch_size
    if all("--global-batch-size" in line for line in counted.invalid):
        shown = counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        raise InputError(
            f"--global-batch-size {step}: none of {many} layouts on {shown} GPUs divides it; "
            f"allowed: a multiple of a layout's dp · micro-batch"
        )
    line, times = counted.invalid.most_common(1)[0]
    raise InputError(f"{line} (none of {many} layouts is valid; {times} of them for this reason)")


__all__ = ["Layout", "plan"]
