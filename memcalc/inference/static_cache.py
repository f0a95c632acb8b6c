"""transformers' StaticCache on paper (cache_utils.py, StaticLayer and StaticSlidingWindowLayer).

Each layer allocates keys and values of its longest length in its first update, and writes new tokens into them. A layer with
a window has at most the window's tokens. Once it is full, a new token rolls them by one place into copies, which are copied
back. A prompt longer than the window is attended to as it is; its last tokens are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import like
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.inference.caches import COMPONENT, Cached, DynamicCache, Pair, cached_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.module import Module, Run
    from memcalc.families.base.program import Program


class StaticCache(DynamicCache):
    """A StaticCache(config=model.config, max_cache_len=longest) that has `seen` tokens."""

    is_compileable = True

    def __init__(self, program: Program, longest: int, seen: int = 0) -> None:
        super().__init__(program.cache_windows(), None, seen)
        self.longest = longest
        self.full_layer = next((i for i in range(program.layers) if i not in self.windows), 0)
        """The layer that sizes the masks of full attention; the first one if all have windows."""

    def length(self, layer: int) -> int:
        """Return the tokens that a layer has room for."""
        return min(self.longest, self.windows.get(layer, self.longest))

    def begin(self, run: Run) -> None:
        """Do nothing: layers allocate in their first update."""

    def fill(self, run: Run, cached: Mapping[int, Cached], prompt: int) -> None:
        self.cached = dict(cached)
        for layer, one in cached.items():
            run.memory.layer, run.memory.scope = layer, one.scope
            self._allocate(run, layer, one)
        run.memory.layer, run.memory.scope = None, ""

    def update(self, m: Module, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        layer = m.memory.layer
        assert layer is not None
        new = cached_of(m, key_states, value_states)
        self.cached.setdefault(layer, new._replace(value_dtype=key_states.dtype))
        if layer not in self.layers:
            self._allocate(m.run, layer, self.cached[layer])
        if layer in self.windows and self.seen >= self.length(layer):
            _roll(self.layers[layer])
        elif layer in self.windows and key_states.shape[2].size > self.length(layer):
            return key_states, value_states
        else:
            _positions(m, key_states.shape[2])
        return self.layers[layer]

    def keys_in_mask(self, queries: Dim, *, windowed: bool) -> Dim:
        layer = next(iter(self.windows), self.full_layer) if windowed else self.full_layer
        length = self.length(layer)
        new = self.seen + queries.size
        return Dim("tokens", new if layer in self.windows and self.seen < length < new else length)

    def length_and(self, run: Run, tokens: Dim) -> Tensor | None:
        return new_tensor(run.memory, (), int64, "tokens so far") if self.numbers else None

    def _allocate(self, run: Run, layer: int, one: Cached) -> None:
        """Run `lazy_initialization`."""
        batch, heads, width = one.keys
        tokens = Dim("longest", self.length(layer))
        keys = new_tensor(run.memory, (batch, heads, tokens, width), one.key_dtype, "keys", component=COMPONENT)
        shape = batch, heads, tokens, one.values[2]
        self.layers[layer] = Pair(keys, new_tensor(run.memory, shape, one.value_dtype, "values", component=COMPONENT))
        self.numbers.append(new_tensor(run.memory, (), int64, "tokens so far", component=COMPONENT))


def _positions(m: Module, tokens: Dim) -> None:
    """Make the places that new tokens are written to: `torch.arange(kv_length) + cumulative_length`."""
    like(new_tensor(m.memory, (tokens,), int64, "places"), "places in the cache")


def _roll(pair: Pair) -> None:
    """Make the rolled copies of a full window, which are copied back."""
    new_keys, new_values = like(pair.keys, "rolled keys"), like(pair.values, "rolled values")
    _index = new_tensor(pair.keys.memory, (ONE_DIM,), int64, "last place")
    del new_keys, new_values
