"""The time of a collective: a latency for every step of its ring, and its bytes over the slowest link.

    seconds = calls · (base + steps inside nodes · step + steps between nodes · network step) + bytes sent / bandwidth

Inside a node a GPU that was measured has its own latency and bus bandwidth for each collective and number of ranks
(memcalc/hardware/speeds/): reductions in the switch (NVLS) are in them. For other GPUs and between nodes latencies are
those that NCCL chooses its algorithms by (src/graph/tuning.cc of 2.26: baseLatencies and hwLatencies of ring and tree,
added up as in ncclTopoTuneModel), for the protocol Simple. The messages of a step are large, and only Simple has a
link's whole bandwidth (LL has half of it, LL128 120 of 128 bytes). An all-reduce between nodes takes the ring or the
tree, whichever is faster. Of a data sheet's bandwidth, in one direction, a share is reached: INSIDE, NETWORK. Traffic of
other groups over the same links is not modelled.

Ranks are numbered in Megatron's default order tp-cp-ep-dp-pp: tensor-parallel neighbours are next to each other,
pipeline stages farthest apart. A node has `--gpus-per-node` consecutive ranks, each GPU with a network card of its own.
A ring that crosses nodes has as many lanes between them as the group has ranks in the node with the fewest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil, log2
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from memcalc.hardware.speed import Bus
    from memcalc.inputs.gpu import GPU
    from memcalc.layout.collectives import Collective, Overlap
    from memcalc.setup.setup import Setup

SOURCE: Final = "latencies: NCCL 2.26 src/graph/tuning.cc, Simple; bandwidths: shares of data sheets, one direction"
INSIDE: Final = 0.7
"""The share of a link inside a node that is reached where nobody has measured: A100 0.6 to 0.67, H100 0.62 to 0.87, B200
0.59 to 0.74."""
SENDS: Final = 0.87
"""The share that a send reaches: A100 274 of 300, H100 376 of 450, GB200 746 of 900 GB/s
(NVIDIA, GTC24 S62129, GTC25 S72583)."""
NETWORK: Final = 0.94
"""The share of the network that is reached: DGX A100 192 of 200, DGX H100 370 to 380 of 400 GB/s a node (the same slides)."""
BASE: Final = 8.4e-6
STEP: Final = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14e-6}
_TREES: Final = 2
"""The tree goes up and down."""


class Group(NamedTuple):
    """The location of a collective's ranks. If nodes cut some groups in two and others not, it is that of the worst
    group."""

    size: int
    nodes: int
    fewest: int
    """The ranks in the node with the fewest. `most` is the number in the node with the most."""
    most: int


class Link(NamedTuple):
    """One direction of one GPU's connection."""

    name: str
    bytes_per_second: float
    """The bytes a second that a collective reaches."""
    measured: Bus | None = None
    """The measured bus, whose latency is a call's, however little it sends; None: the steps of NCCL's algorithm are added
    up."""

    @property
    def step(self) -> float:
        """Return the seconds that one step of a ring takes over the link, however little is sent."""
        return STEP[self.name]


class Cost(NamedTuple):
    """The time of a collective in one optimizer step."""

    seconds: float
    link: str
    formula: str
    """The formula of the seconds with its numbers."""
    basis: Literal["measured", "assumed"]
    source: str


class Unknown(NamedTuple):
    """The reason why a time is not known."""

    missing: str


class StepTime(NamedTuple):
    """Seconds of communication in a step, by the phase whose compute can hide them."""

    exposed: float
    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Return the seconds of all collectives, one after the other."""
        return self.exposed + self.forward + self.backward


# --- the GPUs of a group


def distance(collective: Collective, setup: Setup) -> int:
    """Return the distance of two neighbours of the group in rank order."""
    if collective.apart is not None:
        return collective.apart
    stage = setup.gpus // setup.pp
    if collective.group_size > {"pp": setup.pp, "tp": max(setup.tp, setup.etp), "cp": setup.cp}.get(
        collective.axis, stage
    ):
        return setup.gpus // collective.group_size  # a group of several axes counts as spread evenly over all ranks
    if collective.axis == "pp":  # a tied embedding is summed over the first and the last stage
        tied = collective.collective == "all_reduce" and collective.group_size == 2
        return stage * (setup.pp - 1 if tied else 1)
    if collective.axis == "dp":  # the outermost axis of a stage; a hybrid shard group is inside its replicas
        inside = setup.zero and collective.collective != "all_reduce"
        return stage // (collective.group_size * (setup.replicas if inside else 1))
    if collective.axis == "ep":  # counts of tokens go to all ranks that share the experts
        return setup.etp if collective.group_size == setup.ep else 1
    return {"tp": 1, "cp": setup.tp}[collective.axis]


@lru_cache(maxsize=1024)
def group_of(size: int, apart: int, gpus: int, gpus_per_node: int) -> Group:
    """Return the worst of the groups that `gpus` ranks have: the one with the fewest ranks in one of its nodes."""
    if apart >= gpus_per_node:
        return Group(size, size, 1, 1)
    starts = {0}
    if gpus > gpus_per_node:
        for block in range(min(gpus // (size * apart), gpus_per_node)):
            first = block * size * apart  # the groups of a block start at its first `apart` ranks
            starts |= {first % gpus_per_node, (first + apart - 1) % gpus_per_node}
    return min((_from(start, size, apart, gpus_per_node) for start in starts), key=lambda g: (g.fewest, -g.nodes))


def _from(start: int, size: int, apart: int, gpus_per_node: int) -> Group:
    """Return the group whose first rank is the `start`th of its node."""
    first = min(size, -(-(gpus_per_node - start) // apart))
    last_rank = start + (size - 1) * apart
    nodes = last_rank // gpus_per_node + 1
    if nodes == 1:
        return Group(size, 1, size, size)
    last = last_rank % gpus_per_node // apart + 1
    between = [gpus_per_node // apart] if nodes > 2 else []
    return Group(size, nodes, min(first, last, *between), max(first, last, *between))


# --- the links of a group


def link_inside(gpu: GPU, group: Group, apart: int, kind: str) -> Link | Unknown:
    """Return the link between a group's ranks in one node, for a kind of collective. A bridge joins two GPUs; larger
    groups take PCIe."""
    if not gpu.links:
        return Unknown(f"the links of {gpu.full_name} are not known")
    if gpu.vendor != "nvidia":
        return Unknown(f"the latencies are NCCL's, and {gpu.full_name} is not NVIDIA's")
    span = (group.most - 1) * apart + 1
    bridged = gpu.nvlink_group is None or span <= gpu.nvlink_group.value
    name = "nvlink" if "nvlink" in gpu.links and bridged else "pcie"
    if name not in gpu.links:
        return Unknown(f"{gpu.full_name} has no known {name} bandwidth")
    from memcalc.hardware.speed import speed_of

    bus = speed_of(gpu.name).bus(group.most, kind) if name == "nvlink" else None
    if bus is not None:
        return Link(name, bus.bytes_per_second, bus)
    return Link(name, (SENDS if kind == "send" else INSIDE) * gpu.links[name].nbytes / 2)


def link_between(setup: Setup, gpu: GPU) -> Link | Unknown:
    """Return one GPU's part of the network between nodes."""
    if setup.network_gbps is None:
        return Unknown(f"NVIDIA has no node with {gpu.full_name} whose network could be assumed: give --network-gbps")
    return Link("network", NETWORK * setup.network_gbps * 1e9 / 8)


# --- the time of a collective


def steps(kind: str, group: Group) -> tuple[int, int]:
    """Return the steps of one call inside nodes and between them (tuning.cc): those of a ring, or of a tree for an
    all-reduce that is faster so. An all-to-all has one for every other rank."""
    if kind == "send":
        return (1, 0) if group.nodes == 1 else (0, 1)
    if kind == "all_to_all":
        return group.fewest - 1, group.size - group.fewest
    rounds = 2 if kind == "all_reduce" else 1
    between = rounds * (group.nodes - 1)
    ring = rounds * (group.size - 1) - between, between
    if kind != "all_reduce" or group.nodes == 1:
        return ring
    tree = _TREES * (group.most - 1), _TREES * ceil(log2(group.nodes))
    return min(ring, tree, key=lambda one: one[0] * STEP["nvlink"] + one[1] * STEP["network"])


def cost(collective: Collective, group: Group, inside: Link, between: Link | None) -> Cost:
    """Return the time of all calls of a collective in a step. `between` is the network if the group is on more than one
    node."""
    if group.size == 1:
        return Cost(0.0, "", "0", "assumed", SOURCE)
    kind, calls, wire = collective.collective, collective.calls, collective.wire
    seconds = seconds_of(kind, calls, wire, group, inside, between)
    parts = _parts(kind, wire, group, inside, between)
    terms = [f"{calls}·({_waits(kind, group, inside, between)})", *(_term(*part, inside) for part in parts if part[0])]
    link, formula = inside if between is None else between, " + ".join(terms)
    if link.measured is None:
        return Cost(seconds, link.name, formula, "assumed", SOURCE)
    return Cost(seconds, link.name, formula, "measured", link.measured.source)


def _waits(kind: str, group: Group, inside: Link, between: Link | None) -> str:
    """Return the latency of a call as a sum."""
    if between is None and inside.measured is not None:
        return f"{inside.measured.latency * 1e6:g} µs"
    counts = zip((inside, between), steps(kind, group), strict=True)
    terms = (f"{count}·{link.step * 1e6:g} µs" for link, count in counts if count and link is not None)
    return " + ".join((f"{BASE * 1e6:g} µs", *terms))


def seconds_of(kind: str, calls: Any, wire: Any, group: Group, inside: Link, between: Link | None) -> Any:
    """Return the seconds of all calls, for more than one rank. `calls` and `wire` may be arrays for many collectives at
    once."""
    wait = BASE
    if between is None and inside.measured is not None:
        wait = inside.measured.latency
    else:
        for link, count in zip((inside, between), steps(kind, group), strict=True):
            wait += count * link.step if count and link is not None else 0.0
    parts = _parts(kind, wire, group, inside, between)
    return calls * wait + sum(nbytes / _bandwidth(link, lanes, inside) for nbytes, link, lanes in parts)


def _parts(kind: str, wire: Any, group: Group, inside: Link, between: Link | None) -> list[tuple[Any, Link, int]]:
    """Return bytes, link and lanes of each part of the traffic."""
    return [(wire, inside, 1)] if between is None else _between_nodes(kind, wire, group, inside, between)


def _between_nodes(kind: str, wire: Any, group: Group, inside: Link, between: Link) -> list[tuple[Any, Link, int]]:
    """Return bytes, link and lanes: a ring goes through all cards of a node at once, an all-to-all and a send through
    one's own."""
    if kind == "all_to_all":
        near = wire * (group.fewest - 1) // (group.size - 1)
        return [(near, inside, 1), (wire - near, between, 1)]
    return [(wire, between, 1 if kind == "send" else group.fewest)]


def _bandwidth(link: Link, lanes: int, inside: Link) -> float:
    """Return bytes per second, at most those of a GPU's link inside its node, which every byte passes too."""
    return min(lanes * link.bytes_per_second, inside.bytes_per_second)


def _term(nbytes: int, link: Link, lanes: int, inside: Link) -> str:
    rate = f"{link.bytes_per_second / 1e9:g}"
    if link is inside:
        return f"{nbytes} B / {rate} GB/s"
    cards = f"{lanes}·{rate}" if lanes > 1 else rate
    if lanes * link.bytes_per_second <= inside.bytes_per_second:
        return f"{nbytes} B / ({cards} GB/s)" if lanes > 1 else f"{nbytes} B / {cards} GB/s"
    return f"{nbytes} B / min({cards}, {inside.bytes_per_second / 1e9:g}) GB/s"


class Path(NamedTuple):
    """A collective's group and its links."""

    group: Group
    inside: Link
    between: Link | None
    """The network link; None if the group is in one node."""


def path_of(collective: Collective, setup: Setup, gpu: GPU) -> Path | Unknown:
    """Return the path of a collective of this setup on this GPU, whatever it sends; Unknown if a link is not known."""
    if setup.engine == "parameter-server":
        return Unknown("the servers' hosts and links are not known")
    apart = distance(collective, setup)
    group = group_of(collective.group_size, apart, setup.gpus, setup.gpus_per_node)
    inside = link_inside(gpu, group, apart, collective.collective)
    if isinstance(inside, Unknown):
        return inside
    between = link_between(setup, gpu) if group.nodes > 1 else None
    return between if isinstance(between, Unknown) else Path(group, inside, between)


def cost_of(collective: Collective, setup: Setup, gpu: GPU) -> Cost | Unknown:
    """Return the time of a collective of this setup on this GPU; Unknown if a link is not known."""
    path = path_of(collective, setup, gpu)
    return path if isinstance(path, Unknown) else cost(collective, *path)


def step_time(collectives: Iterable[Collective], costs: Sequence[Cost | Unknown]) -> StepTime | None:
    """Return the communication time of a step; None if the time of a collective is not known."""
    sums: dict[Overlap, float] = {"exposed": 0.0, "forward": 0.0, "backward": 0.0}
    for collective, one in zip(collectives, costs, strict=True):
        if isinstance(one, Unknown):
            return None
        sums[collective.overlap] += one.seconds
    return StepTime(**sums)
