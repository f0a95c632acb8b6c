"""The rows of what engines keep in the host's memory, on a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.offload.host import HostRow
    from memcalc.setup.setup import Setup


def on_host(model: Model, setup: Setup) -> list[HostRow]:
    """Return the rows of the node whose ranks keep most on the host, or of the busiest parameter server; none if nothing is
    offloaded."""
    if setup.servers is not None:
        from memcalc.engines.parameter_server import on_server

        return on_server(model, setup)
    if not setup.offloads:
        return []
    if setup.engine == "fsdp2":
        from memcalc.engines.fsdp2.offloaded import on_host as shards_and_all

        return shards_and_all(model, setup)
    if setup.offload_params != "none":
        from memcalc.engines.deepspeed.offloaded_params import on_host as weights_and_all

        return weights_and_all(model, setup)
    from memcalc.engines.deepspeed import offloaded_1_2, offloaded_3

    return (offloaded_3 if setup.zero == 3 else offloaded_1_2).on_host(model, setup)
