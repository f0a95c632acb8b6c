"""A setup as torchrun's command line, which starts as many processes on every node.

Source: torch/distributed/run.py of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.formats.unsaid import unsaid
from memcalc.formats.written import Written
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_SCRIPT: Final = "train.py"


def write(setup: Setup, model: Model) -> Written:
    """Return the command line. Raises InputError for GPUs that do not fill their nodes."""
    nodes, processes = _nodes(setup)
    command = f"torchrun --nnodes={nodes} --nproc-per-node={processes} {_SCRIPT}\n"
    comment = (
        f"# On each of the {nodes} nodes, with --node-rank (0 to {nodes - 1}) and the --master-addr of node 0.\n"
        if nodes > 1
        else ""
    )
    said = ("gpus", "gpus_per_node") if nodes > 1 else ("gpus",)
    return Written(comment + command, unsaid(setup, model, said, {}, {}))


def _nodes(setup: Setup) -> tuple[int, int]:
    """Return the nodes, and the processes on each."""
    if setup.gpus <= setup.gpus_per_node:
        return 1, setup.gpus
    nodes, rest = divmod(setup.gpus, setup.gpus_per_node)
    if rest:
        each = f"torchrun starts as many processes on every node, of {setup.gpus_per_node} GPUs (--gpus-per-node)"
        refuse("gpus", setup.gpus, f"{each}; allowed: up to {setup.gpus_per_node}, or a multiple of it")
    return nodes, setup.gpus_per_node
