"""`memcalc compare --deepspeed-table`: DeepSpeed's tables of memory needs, for any model and number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from memcalc.decisions.combinations import MOST, listed
from memcalc.decisions.mem_needs import BUFFER_FACTOR, Counted, Needs, Nodes, counted, zero2_needs, zero3_needs
from memcalc.errors import InputError
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import check_options, option_name
from memcalc.report.document import SCHEMA_VERSION

_EXAMPLE: Final = "memcalc compare llama-7b --gpus 8 --deepspeed-table"
_TABLES: Final = {2: zero2_needs, 3: zero3_needs}
_TAKEN: Final = ("gpus", "gpus_per_node", "zero")


@dataclass(frozen=True)
class DeepSpeedTable:
    """DeepSpeed's lines for one model, number of GPUs and ZeRO stage."""

    model: str
    params: Counted
    nodes: Nodes
    zero: int
    needs: tuple[Needs, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the table for JSON."""
        needs = [{name: value for name, value in one._asdict().items() if name != "zero"} for one in self.needs]
        return {"model": self.model, **self.params._asdict(), **self.nodes._asdict(), "zero": self.zero, "needs": needs}


@dataclass(frozen=True)
class DeepSpeedTables:
    tables: tuple[DeepSpeedTable, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "additional_buffer_factor": BUFFER_FACTOR,
            "deepspeed_tables": [one.to_dict() for one in self.tables],
        }


def deepspeed_tables(model: Any = None, **options: Any) -> DeepSpeedTables:
    """Return the tables of every combination of `model`, `gpus`, `gpus_per_node` and `zero`, each a value or a list.

    Without `zero` there are both tables. Raise InputError without a model, for GPUs that fill no whole nodes, for a `zero`
    without a table, and for any other option: the tables know of none.
    """
    if model is None:
        raise InputError(f"--deepspeed-table: needs --model, whose parameters are counted; as in: {_EXAMPLE}")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in _TAKEN:
            known = ", ".join(["--model", *map(option_name, _TAKEN)])
            raise InputError(f"--deepspeed-table: DeepSpeed's tables know no {option_name(name)}; allowed: {known}")
    models = [load_model(one) for one in listed(model)]
    places = [_nodes(*one) for one in product(_values(given, "gpus", 1), _values(given, "gpus_per_node", 8))]
    stages = [_stage(one) for one in _values(given, "zero", [2, 3])]
    count = len(models) * len(places) * len(stages)
    if count > MOST:
        raise InputError(f"--deepspeed-table: {count} tables; allowed: at most {MOST}")
    return DeepSpeedTables(tuple(_table(*one) for one in product(models, places, stages)))


def _values(given: dict[str, Any], name: str, otherwise: Any) -> list[Any]:
    values = listed(given.get(name, otherwise))
    for value in values:
        check_options({name: value})
    return list(dict.fromkeys(values))


def _nodes(gpus: int, gpus_per_node: int) -> Nodes:
    if gpus <= gpus_per_node:
        return Nodes(1, gpus)
    if gpus % gpus_per_node:
        said = f"--gpus {gpus}: DeepSpeed's tables know equal nodes"
        raise InputError(f"{said}; allowed: up to {gpus_per_node}, or a multiple of --gpus-per-node {gpus_per_node}")
    return Nodes(gpus // gpus_per_node, gpus_per_node)


def _stage(zero: int) -> int:
    if zero not in _TABLES:
        raise InputError(f"--zero {zero}: DeepSpeed has no table of this stage; allowed with --deepspeed-table: 2, 3")
    return zero


def _table(model: Model, on: Nodes, zero: int) -> DeepSpeedTable:
    of = counted(model)
    return DeepSpeedTable(model.name, of, on, zero, tuple(_TABLES[zero](of, on)))
