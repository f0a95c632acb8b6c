"""Every layout of a model on some GPUs: engine, degrees, stages, shards, micro-batch and recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from memcalc.pipelining.schedules import NAMES

ENGINES: Final = ("none", "ddp", "deepspeed", "fsdp2", "megatron")
ON_REQUEST: Final = ("fsdp1",)
"""The engines that are searched only if they are given: another one has taken their place."""
_STAGES: Final[Mapping[str, tuple[int, ...]]] = {
    "deepspeed": (0, 1, 2, 3), "fsdp1": (2, 3), "fsdp2": (2, 3), "megatron": (0, 1),
}  # fmt: skip
"""The ZeRO stages that an engine has; 0 for the others."""
_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "deepspeed": ("tp", "pp", "cp", "ep"),
    "fsdp2": ("tp", "pp", "cp", "ep"),
    "megatron": ("tp", "pp", "cp", "ep"),
}
"""The axes that an engine has besides data parallelism."""
_RECOMPUTE: Final[Mapping[str, tuple[str, ...]]] = {
    "fsdp2": ("none", "op", "full"),
    "megatron": ("none", "selective", "full"),
}
_ONE_NUMBER: Final = ("1f1b", "gpipe", *NAMES)
"""The schedules that decide the number of chunks of a rank."""
LIMITS: Final[Mapping[str, int]] = {"tp": 64, "cp": 32, "micro_batch_size": 8, "virtual_stages": 8}
"""The largest numbers that are tried without a `--max-...` option; other axes end where the GPUs or the model do."""


class Layout(NamedTuple):
    """The options that a search varies. None stands for the default."""

    gpu: str
    gpus: int
    engine: str
    zero: int
    tp: int
    pp: int
    cp: int
    ep: int
    virtual_stages: int
    schedule: str
    shard_group: int | None
    sequence_parallel: bool
    recompute: str
    micro_batch_size: int

    @property
    def dp(self) -> int:
        """Return the number of ranks that have the same part of the model."""
        return self.gpus // (self.tp * self.pp * self.cp)


class Degrees(NamedTuple):
    """The layouts that have the same engine, ZeRO stage, degrees and sequence parallelism: every choice of the others."""

    first: Layout
    chunks: tuple[tuple[int, str], ...]
    """The numbers of model chunks on a rank, each with its schedule."""
    shard_groups: tuple[int | None, ...]
    recompute: tuple[str, ...]
    micro_batches: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chunks) * len(self.shard_groups) * len(self.recompute) * len(self.micro_batches)

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout."""
        before, sharded = self.first[:8], self.first.sequence_parallel
        for virtual, schedule in self.chunks:
            for group in self.shard_groups:
                for recompute in self.recompute:
                    for batch in self.micro_batches:
                        yield Layout(*before, virtual, schedule, group, sharded, recompute, batch)


class Space(NamedTuple):
    """The layouts of a search: what is fixed, and how far each axis goes."""

    fixed: Mapping[str, Any]
    """The options that are given; one that a layout has narrows the search to it."""
    most: Mapping[str, int]
    """The largest number that is tried, by option."""
    layers: int
    experts: int
    """The experts of a layer; 1 without any."""
    global_batch_size: int
    gpus_per_node: int

    def layouts(self, gpu: str, gpus: int) -> Iterator[Layout]:
        """Yield every layout on a number of GPUs, those that an engine refuses too."""
        for degrees in self.degrees(gpu, gpus):
            yield from degrees.layouts()

    def degrees(self, gpu: str, gpus: int) -> Iterator[Degrees]:
        """Yield the layouts on a number of GPUs, those of the same degrees together."""
        for engine in self._engines(gpus):
            for zero in self._one("zero", _STAGES.get(engine, (0,))):
                yield from self._of_engine(gpu, gpus, engine, zero)

    def _engines(self, gpus: int) -> tuple[str, ...]:
        engine = self.fixed.get("engine")
        if engine is not None:
            return (engine,)
        tuned = self.fixed.get("freeze") is not None or self.fixed.get("lora_rank")
        engines = [one for one in ENGINES if one != "none" or gpus == 1]
        return tuple(one for one in engines if one != "megatron" or not tuned)

    def _one(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the given value of an option, else `values` up to the option's limit."""
        if self.fixed.get(name) is not None:
            return (self.fixed[name],)
        most = self.most.get(name)
        return values if most is None else tuple(value for value in values if value <= most)

    def _degrees(self, engine: str, axis: str, of: int) -> tuple[int, ...]:
        """Return the degrees of an axis: the divisors of a number of GPUs."""
        if axis not in _AXES.get(engine, ()):
            return self._one(axis, (1,))
        return self._one(axis, divisors(of))

    def _of_engine(self, gpu: str, gpus: int, engine: str, zero: int) -> Iterator[Degrees]:
        for tp in self._degrees(engine, "tp", gpus):
            for pp in self._pipelines(engine, gpus // tp if gpus % tp == 0 else 1):
                for cp in self._degrees(engine, "cp", gpus // (tp * pp) if gpus % (tp * pp) == 0 else 1):
                    for ep in self._expert_degrees(engine, gpus // pp if gpus % pp == 0 else 1):
                        degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
                        yield from self._of_degrees(Layout(
                            gpu, gpus, engine, zero, **degrees, virtual_stages=1, schedule="1f1b", shard_group=None,
                            sequence_parallel=False, recompute="none", micro_batch_size=1,
                        ))  # fmt: skip

    def _pipelines(self, engine: str, of: int) -> tuple[int, ...]:
        found = self._degrees(engine, "pp", of)
        return found if self.fixed.get("pp") is not None else tuple(pp for pp in found if pp <= self.layers + 2)

    def _expert_degrees(self, engine: str, of: int) -> tuple[int, ...]:
        if self.experts == 1:
            return self._one("ep", (1,))
        found = self._degrees(engine, "ep", of)
        return found if self.fixed.get("ep") is not None else tuple(ep for ep in found if self.experts % ep == 0)

    def _of_degrees(self, base: Layout) -> Iterator[Degrees]:
        schedule, virtual = self.fixed.get("schedule"), self._virtual_stages(base)
        chunks = tuple((count, schedule or ("interleaved" if count > 1 else "1f1b")) for count in virtual)
        groups = self._one("shard_group", self._shard_groups(base))
        recompute = self._one("recompute", _RECOMPUTE.get(base.engine, ("none", "full")))
        batches = self._one("micro_batch_size", self._micro_batches(base))
        if not (chunks and groups and recompute and batches):
            return
        for sharded in self._one("sequence_parallel", self._sequence_parallel(base)):
            first = base._replace(
                virtual_stages=chunks[0][0], schedule=chunks[0][1], shard_group=groups[0], sequence_parallel=sharded,
                recompute=recompute[0], micro_batch_size=batches[0],
            )  # fmt: skip
            yield Degrees(first, chunks, groups, recompute, batches)

    def _virtual_stages(self, base: Layout) -> tuple[int, ...]:
        """Return the numbers of model chunks on a rank: those that make equal chunks of the layers, with the embedding and
        the head counted as layers or not."""
        if base.pp == 1 or base.engine == "deepspeed" or self.fixed.get("schedule") in _ONE_NUMBER:
            return self._one("virtual_stages", (1,))
        most = self.most["virtual_stages"]
        equal = [v for v in range(2, most + 1) if any((self.layers + e) % (v * base.pp) == 0 for e in range(3))]
        few = () if self.fixed.get("schedule") == "interleaved" else (1,)
        return self._one("virtual_stages", (*few, *equal))

    def _shard_groups(self, base: Layout) -> tuple[int | None, ...]:
        """Return the groups that shard: all ranks, and those of a node."""
        ranks = base.gpus // (base.tp * base.pp)
        node = self.gpus_per_node // base.tp
        shards = base.engine in ("fsdp1", "fsdp2") or (base.engine == "megatron" and base.zero == 1)
        return (None, node) if shards and 1 < node < ranks and ranks % node == 0 else (None,)

    def _sequence_parallel(self, base: Layout) -> tuple[bool, ...]:
        return (True, False) if base.tp > 1 and base.engine in ("megatron", "fsdp2") else (False,)

    def _micro_batches(self, base: Layout) -> tuple[int, ...]:
        """Return the powers of two up to the limit that divide a rank's sequences of a step."""
        own, rest = divmod(self.global_batch_size, max(1, base.dp))
        most = self.most["micro_batch_size"]
        powers = tuple(1 << i for i in range(most.bit_length()) if 1 << i <= most)
        return (1,) if rest else tuple(batch for batch in powers if own % batch == 0)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a whole number, the smallest first."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
