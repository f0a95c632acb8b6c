"""Synchronous parameter servers: workers push gradients and pull weights, servers add, update and hold the states.

`--gpus` are the workers. `--servers` are hosts beside them. Each server has an equal range of the parameters, as ps-lite
divides its keys (Postoffice::GetServerKeyRanges in ps-lite/src/postoffice.cc). This is the textbook's engine (Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014): no framework's buffers are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.engines import none as plain
from memcalc.engines.base.holdings import Holdings, state_rows
from memcalc.layout.collectives import Collective
from memcalc.offload.host import HostRow
from memcalc.optimizers import Parameter

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

SOURCE: Final = "Li et al., OSDI 2014"


class Traffic(NamedTuple):
    """The bytes of one step at the busiest server: gradients that come in, weights that go out."""

    received: int
    sent: int


def holdings(model: Model, setup: Setup) -> Holdings:
    """Return what a worker holds: weights, gradients and activations, but no optimizer states."""
    held = plain.holdings(model, setup)
    assert held.order is not None
    always = tuple(row for row in held.always if row.component != "optimizer_states")
    before = tuple(row for row in held.order.before if row.component != "optimizer_states")
    order = held.order._replace(before=before, states=(), casts=(), updates=(), clipping=())
    step = tuple(row for row in held.step if row.component == "gradients")
    return held._replace(always=always, step=step, order=order)


def collectives(model: Model, setup: Setup) -> list[Collective]:
    """Return what a worker sends in a step: its gradients, once. The weights come back from the servers."""
    size = setup.compute_dtype.itemsize
    payload = model.num_parameters * size
    formula = f"parameters·{size} B = {model.num_parameters}·{size} B"
    return [
        Collective(
            "dp", "send", "gradients, pushed", "step", setup.compute_dtype.name, setup.dp, setup.servers or 1, payload,
            formula, source=SOURCE,
        ),
    ]  # fmt: skip


def range_of_a_server(model: Model, setup: Setup) -> int:
    """Return the parameters of the busiest server: an equal range, rounded up."""
    return -(-model.num_parameters // (setup.servers or 1))


def traffic_of_a_server(model: Model, setup: Setup) -> Traffic:
    """Return what the busiest server receives and sends in a step, for all workers."""
    each = setup.dp * range_of_a_server(model, setup) * setup.compute_dtype.itemsize
    return Traffic(each, each)


def on_server(model: Model, setup: Setup) -> list[HostRow]:
    """Return what the busiest server holds: weights, optimizer states, and the sum of the gradients that have come."""
    elements, dtype = range_of_a_server(model, setup), setup.compute_dtype
    updated = fp32 if setup.has_master_weights else dtype
    dim = "parameters of a server"
    rows = [HostRow("paged", "weights that workers pull", dim, (elements,), dtype, "always", SOURCE)]
    if setup.has_master_weights:
        rows.append(HostRow("paged", "fp32 master", dim, (elements,), fp32, "always", SOURCE))
    for row in state_rows(setup, [Parameter("weights", (Dim(dim, elements),), 1, False)], updated):
        if row.shape:
            name = row.name.removeprefix("weights: ")
            rows.append(HostRow("paged", name, dim, (row.shape[0].size,), row.dtype, "always", SOURCE))
    rows.append(
        HostRow("paged", "sum of the gradients", dim, (elements,), dtype, "until all workers have pushed", SOURCE)
    )
    return rows


def textbook(model: Model, setup: Setup) -> list[Collective]:
    return []
