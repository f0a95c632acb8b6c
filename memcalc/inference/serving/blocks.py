"""vLLM's plan of its KV cache: pages of layers, groups of layers that share a table of blocks, and the number of blocks.

A page holds `block_size` tokens of one layer. All layers of a group have the same table, so a block is one page of each. Layers
of different kinds (full attention, a sliding window, a recurrent state) are groups of their own, which share one pool: a block
has the bytes of the largest group. Pages are made equal first: a smaller one holds more tokens, or is padded
(vllm 0.33 v1/core/kv_cache_planning.py and v1/kv_cache_interface.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["full", "latent", "sliding", "chunked", "mamba", "cross"]
_FEW: Final = 1.5
"""The most that the largest kind may have of the smallest kind's layers for groups as large as the largest."""
_ANY_LENGTH: Final = ("full", "latent")


class Spec(NamedTuple):
    """The needs of one layer of the cache. Equal specs are one kind of layers."""

    kind: Kind
    block_size: int
    token: int = 0
    """Bytes of a token; 0 for a recurrent state."""
    window: int = 0
    """The tokens of a sliding window, or of a chunk."""
    state: int = 0
    """Bytes of a recurrent state."""
    padded: int = 0
    """Bytes of the page if it is padded; 0: it is not."""
    shape: tuple[int, ...] = ()
    """The heads and widths, which two layers of one kind may differ in."""

    @property
    def page(self) -> int:
        """Return the bytes of a page."""
        return self.padded or self.unpadded

    @property
    def unpadded(self) -> int:
        """Return the bytes of a page that are used."""
        return self.state if self.kind == "mamba" else self.token * self.block_size


class Workload(NamedTuple):
    """The numbers that decide how many blocks a sequence takes."""

    length: int
    """The longest sequence (`max_model_len`)."""
    in_flight: int
    """The most tokens of batches that are under way, whose blocks outside a window are not free yet."""
    states: int = 1
    """The states that a recurrent layer keeps of a sequence: 2 or 3 with prefix caching."""
    encoder: int = 0
    """The tokens of the encoder's longest input."""


class Group(NamedTuple):
    """Layers that share a table of blocks."""

    layers: tuple[Spec, ...]

    @property
    def spec(self) -> Spec:
        return self.layers[0]

    @property
    def bytes_per_block(self) -> int:
        return sum(layer.page for layer in self.layers)

    def blocks(self, work: Workload) -> int:
        """Return the blocks that the longest sequence takes."""
        return max(_pages(layer, work) for layer in self.layers)


class Plan(NamedTuple):
    """The pool of blocks on one GPU."""

    groups: tuple[Group, ...]
    bytes_per_block: int
    num_blocks: int
    """The blocks in the pool. One of them is never used (`null_block`)."""
    blocks_per_sequence: int

    @property
    def max_concurrency(self) -> float:
        """Return what vLLM prints as "Maximum concurrency for N tokens per request"."""
        return self.num_blocks / self.blocks_per_sequence

    @property
    def sequences(self) -> int:
        """Return the sequences of the longest length whose blocks fit at once."""
        return max(0, self.num_blocks - 1) // self.blocks_per_sequence

    def tokens(self, length: int) -> int:
        """Return what vLLM prints as "GPU KV cache size"."""
        return int(self.max_concurrency * length)


def plan(specs: Sequence[Spec], available: int, work: Workload) -> Plan:
    """Return the pool that `available` bytes hold. Raises ValueError if the layers' pages cannot be made equal, or without
    layers that cache."""
    if not specs:
        raise ValueError("no layer caches anything")
    made = groups(specs)
    bytes_per_block = max(group.bytes_per_block for group in made)
    blocks = sum(group.blocks(work) for group in made)
    return Plan(made, bytes_per_block, max(0, available) // bytes_per_block, blocks)


def groups(specs: Sequence[Spec]) -> tuple[Group, ...]:
    """Return the layers in groups (get_kv_cache_groups)."""
    if _alike(specs):
        return (Group(tuple(specs)),)
    return _equal_groups(_with_equal_pages(specs))


def _alike(specs: Sequence[Spec]) -> bool:
    """Tell whether all layers need the same number of blocks (UniformTypeKVCacheSpecs.is_uniform_type)."""
    first = specs[0]
    if len({spec.block_size for spec in specs}) > 1:
        return False
    if first.kind in _ANY_LENGTH:
        return all(spec.kind in _ANY_LENGTH for spec in specs)
    if first.kind == "mamba":
        return all(spec.kind == "mamba" and spec.page == first.page for spec in specs)
    return all(spec.kind == first.kind and spec.window == first.window for spec in specs)


def _with_equal_pages(specs: Sequence[Spec]) -> list[Spec]:
    """Return the specs with pages of one size (unify_kv_cache_spec_page_size)."""
    largest = max(spec.page for spec in specs)
    out: list[Spec] = []
    for spec in specs:
        if spec.page == largest:
            out.append(spec)
        elif spec.kind == "mamba":
            out.append(spec._replace(padded=largest))
        elif not largest % spec.page:
            out.append(spec._replace(block_size=spec.block_size * (largest // spec.page)))
        elif spec.kind != "latent":
            out.append(spec._replace(padded=largest))
        else:
            raise ValueError(f"pages of {spec.page} B of latents cannot be made {largest} B")
    return out


def _equal_groups(specs: Sequence[Spec]) -> tuple[Group, ...]:
    """Return groups of as many layers each (_get_kv_cache_groups_uniform_page_size)."""
    kinds: dict[Spec, list[Spec]] = {}
    for spec in specs:
        kinds.setdefault(spec, []).append(spec)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most < fewest * _FEW else fewest
    out: list[Group] = []
    for layers in kinds.values():
        number = -(-len(layers) // size)
        out += [Group(tuple(layers[i::number])) for i in range(number)]
    return tuple(out)


def _pages(spec: Spec, work: Workload) -> int:
    """Return the pages that a layer needs of the longest sequence (max_memory_usage_bytes of each kind)."""
    match spec.kind:
        case "mamba":
            return work.states
        case "sliding":
            tokens = min(spec.window - 1 + work.in_flight, work.length)
            return -(-tokens // spec.block_size) + 1  # a window need not begin at the beginning of a block
        case "chunked":
            return -(-min(spec.window + work.in_flight, work.length) // spec.block_size)
        case "cross":
            return -(-work.encoder // spec.block_size)
        case _:
            return -(-work.length // spec.block_size)
