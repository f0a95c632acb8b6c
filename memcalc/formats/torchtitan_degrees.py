"""The parallel degrees of torchtitan's TOML, and what follows from them.

Source: torchtitan/distributed/parallel_dims.py, and parallelize_llama in torchtitan/models/llama3/infra/parallelize.py of
v0.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memcalc.formats.found import REPLICAS, Value
from memcalc.formats.torchtitan_config import TitanConfig

_REST = -1
"""The degree of the ranks that the others leave."""


class Degrees(NamedTuple):
    """The degrees of a file; that of sharding, or of replicas under DDP, may be -1."""

    replicas: Value
    shards: Value
    tp: Value
    pp: Value
    cp: Value
    ep: Value
    options: Mapping[str, Value]
    notes: tuple[str, ...]

    @property
    def engine(self) -> str:
        """Return what shards or reduces: fully_shard, DDP, or nothing on one GPU."""
        if self.shards.value != 1 or self.cp.value > 1 or self.ep.value > 1:
            return "fsdp2"
        if self.replicas.value != 1:
            return "ddp"
        return "none" if self.tp.value == self.pp.value == 1 else "fsdp2"

    @property
    def has_policy(self) -> bool:
        """Tell whether FSDP's mixed precision is in use: it is not if no ranks shard."""
        return self.shards.value != 1 or self.cp.value > 1 or self.ep.value > 1

    @property
    def data_parallel(self) -> int | None:
        """Return the ranks with different data; None if the file leaves them open."""
        ranks: int = self.replicas.value * self.shards.value
        return ranks if ranks > 0 else None

    def decides(self, value: object) -> Value:
        """Return a value that follows from the degree of sharding."""
        return self.shards._replace(value=value)


def degrees_of(config: TitanConfig, *, has_experts: bool) -> Degrees:
    """Return the degrees. Raises InputError for those that torchtitan refuses."""
    old_type = config.choice(("fsdp", "ddp"), "fsdp", "training.data_parallel_type")
    replicas = config.whole(1, *_paths("data_parallel_replicate_degree", "training"))
    shards = config.whole(
        _REST, *_paths("data_parallel_shard_degree", "training"), "training.data_parallel_degree", least=_REST
    )
    if shards.value == 0:
        section, key = config.at(*_paths("data_parallel_shard_degree", "training"), "training.data_parallel_degree")
        section.refuse(key, "allowed: -1 (the ranks that the others leave), a whole number from 1")
    if old_type.value == "ddp":
        replicas, shards = shards, shards._replace(value=1)
    tp = config.whole(1, *_paths("tensor_parallel_degree", "training"), "training.sequence_parallel_degree")
    pp = config.whole(1, *_paths("pipeline_parallel_degree", "experimental"), "training.pipeline_parallel_degree")
    cp = config.whole(1, *_paths("context_parallel_degree", "experimental"))
    ep = config.whole(1, "parallelism.expert_parallel_degree")
    ep = ep if has_experts else ep._replace(value=1)
    degrees = Degrees(replicas, shards, tp, pp, cp, ep, {}, ())
    if degrees.engine == "ddp" and max(tp.value, pp.value) > 1:
        section, key = config.at(*_paths("data_parallel_replicate_degree", "training"))
        section.refuse(key, "torchtitan's DDP goes with no other parallelism; allowed: 1, or a shard degree above 1")
    options, notes = _options(config, degrees)
    return degrees._replace(options=options, notes=tuple(notes))


def _paths(key: str, old: str) -> tuple[str, str]:
    return f"parallelism.{key}", f"{old}.{key}"


def _options(config: TitanConfig, degrees: Degrees) -> tuple[dict[str, Value], list[str]]:
    options = {"tp": degrees.tp, "pp": degrees.pp, "cp": degrees.cp}
    ranks = degrees.data_parallel
    notes: list[str] = []
    if ranks is not None:
        options["gpus"] = degrees.decides(ranks * degrees.tp.value * degrees.pp.value * degrees.cp.value)
    else:
        notes += _open(config, degrees)
    if degrees.replicas.value > 1 and degrees.engine == "fsdp2":
        options |= _replicated(degrees)
    if not degrees.has_policy and degrees.engine == "fsdp2":
        alone = "no ranks shard, and weights are fp32 there; fully_shard over one rank is estimated"
        notes.append(config.note(degrees.shards, f"{alone}, which holds a layer gathered besides"))
    for some, more in (_tensor(config, degrees), _context(config, degrees), _experts(config, degrees)):
        options |= some
        notes += more
    return options, notes


def _replicated(degrees: Degrees) -> dict[str, Value]:
    """Return the ranks that shard together, or the number of such groups if the file leaves their size to the GPUs."""
    if degrees.data_parallel is None:
        return {REPLICAS: degrees.replicas}
    return {"shard_group": degrees.decides(degrees.shards.value * degrees.cp.value)}


def _open(config: TitanConfig, degrees: Degrees) -> list[str]:
    """Return a note on a degree that only the number of GPUs decides."""
    if degrees.engine == "ddp" or degrees.cp.value > 1:
        return []
    autocasts = degrees.tp.value == degrees.pp.value == 1 and not config.has_old_batch
    without = "autocast and no FSDP" if autocasts else "fp32 weights and no FSDP"
    rest = f"the ranks that --gpus leaves shard; if it leaves one, torchtitan has {without}, which is not estimated"
    return [config.note(degrees.shards, rest)]


def _tensor(config: TitanConfig, degrees: Degrees) -> tuple[dict[str, Value], list[str]]:
    if degrees.tp.value == 1:
        return {}, []
    disabled = config.flag("parallelism.disable_loss_parallel", "training.disable_loss_parallel")
    enabled = config.flag("training.enable_loss_parallel", default=not disabled.value)
    decides = disabled if disabled.is_given or not enabled.is_given else enabled
    loss = "vocab-parallel" if enabled.value and not disabled.value else "eager"
    options = {
        "sequence_parallel": degrees.tp._replace(value=True),
        "cross_entropy": decides._replace(value=loss),
    }
    overlapped = config.flag(*_paths("enable_async_tensor_parallel", "experimental"))
    if overlapped.value:
        return options, [
            config.note(overlapped, "its overlapped products are not modelled, and plain calls are assumed")
        ]
    return options, []


def _context(config: TitanConfig, degrees: Degrees) -> tuple[dict[str, Value], list[str]]:
    if degrees.cp.value == 1:
        return {}, []
    method = config.choice(
        ("allgather", "alltoall"), "allgather", *_paths("context_parallel_rotate_method", "experimental")
    )
    ways = {"allgather": "all_gather", "alltoall": "p2p"}
    options = {"cp_comm_type": method._replace(value=ways[method.value])}
    parallelism = config.section("parallelism")
    balancer = parallelism.text("context_parallel_load_balancer")
    if balancer in (None, "headtail"):
        return options, []
    value = parallelism.value("context_parallel_load_balancer", balancer)
    return options, [config.note(value, "an early and a late part of a sequence for each rank (headtail) is assumed")]


def _experts(config: TitanConfig, degrees: Degrees) -> tuple[dict[str, Value], list[str]]:
    if degrees.ep.value == 1:
        return {}, []
    notes: list[str] = []
    etp = config.whole(1, "parallelism.expert_tensor_parallel_degree")
    if etp.value not in (1, degrees.tp.value):
        config.section("parallelism").refuse(
            "expert_tensor_parallel_degree", f"allowed: 1, {degrees.tp.value} (the tensor parallel degree)"
        )
    if etp.value > 1:
        notes.append(config.note(etp, "experts are whole on a rank in the estimate"))
    backend = config.choice(("standard", "deepep"), "standard", "parallelism.expert_parallel_comm_backend")
    if backend.value == "deepep":
        notes.append(config.note(backend, "DeepEP's kernels are not modelled, and torch's all-to-alls are assumed"))
    return {"ep": degrees.ep}, notes
