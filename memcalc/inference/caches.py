"""transformers' DynamicCache on paper (cache_utils.py): what each layer holds, and what an update allocates.

A dynamic layer joins its keys with the new ones (`torch.cat`), then its values; the old tensors are there until the new ones
are. A dynamic sliding layer joins both before it lets go of the old ones. It keeps a view of the last `window - 1` tokens,
whose storage has all that were joined: after a prompt all of its tokens, later `window`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.axes import narrow, pad_dim
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Module, Run
    from memcalc.families.base.program import Program

COMPONENT = "kv_cache"
STATE = "state_cache"
CONVOLUTION = "convolution"
"""The name of the state with a convolution's last inputs."""


class Pair(NamedTuple):
    """The keys and values of one layer, (batch, kv_heads, tokens, width) each."""

    keys: Tensor
    values: Tensor


class Cached(NamedTuple):
    """The shapes, without tokens, and dtypes of what a layer caches, as its first update was given them."""

    scope: str
    keys: Shape
    values: Shape
    key_dtype: DType
    value_dtype: DType


class DynamicCache:
    """A DynamicCache(config=model.config). `windows` has the windows of the layers that have one."""

    is_compileable = False

    def __init__(self, windows: Mapping[int, int], full: int | None, seen: int = 0) -> None:
        """Begin an empty cache, or with `fill` one that has `seen` tokens. `full` is the layer whose tokens size the masks of
        full attention; None: the first that has keys and no window."""
        self.windows = windows
        self.full = full
        self.seen = seen
        self.layers: dict[int, Pair] = {}
        self.cached: dict[int, Cached] = {}
        self.numbers: list[Tensor] = []
        self.states: dict[tuple[int, str], Tensor] = {}
        self.cross: dict[int, Pair] = {}
        self.crossed: dict[int, Cached] = {}

    def begin(self, run: Run) -> None:
        """Allocate what an empty cache holds."""
        self.numbers = [window_tensor(run, layer) for layer in self.windows]
        run.memory.layer = None

    def fill(self, run: Run, cached: Mapping[int, Cached], prompt: int) -> None:
        """Allocate what the cache holds after `seen` tokens, `prompt` of which came at once."""
        self.cached = dict(cached)
        self.begin(run)
        for layer, one in cached.items():
            held = tokens_held(self.seen, prompt, self.windows.get(layer))
            visible = tokens_kept(self.seen, self.windows.get(layer))
            run.memory.layer, run.memory.scope = layer, one.scope
            shapes = ((one.keys, one.key_dtype, "keys"), (one.values, one.value_dtype, "values"))
            self.layers[layer] = Pair(*(_past(run, shape, dtype, name, held, visible) for shape, dtype, name in shapes))
        run.memory.layer, run.memory.scope = None, ""

    def fill_states(self, run: Run, program: Program, prompt: int) -> None:
        """Allocate what the layers keep besides keys and values after `seen` tokens, `prompt` of which came at once."""
        states_of = program.states if self.seen > prompt or prompt == 1 else program.states_of_prompt
        for i in range(program.layers):
            run.memory.layer, run.memory.scope = i, "layers.*"
            for state in states_of(i):
                shape, dtype = (run.batch, *state.shape), state.dtype or run.dtype
                self.states[i, state.name] = new_tensor(run.memory, shape, dtype, state.name, component=STATE)
        run.memory.layer, run.memory.scope = None, ""

    def update(self, m: Module, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Run `past_key_values.update`: join the layer's keys and values with the new ones. Returns all of them."""
        layer = m.memory.layer  # a module that several layers share has the number of its owner
        assert layer is not None
        self.cached.setdefault(layer, cached_of(m, key_states, value_states))
        past = self.layers.pop(layer, None)
        if layer in self.windows:
            keys = _joined(None if past is None else past.keys, key_states, "keys")
            values = _joined(None if past is None else past.values, value_states, "values")
            self.layers[layer] = Pair(*(last_tokens(x, self.windows[layer]) for x in (keys, values)))
            return keys, values
        if past is None:
            values_dtype = _wider(
                key_states.dtype, value_states.dtype
            )  # an empty tensor of the keys' dtype is joined with them
            keys = _joined(None, key_states, "keys")
            self.layers[layer] = Pair(keys, _joined(None, value_states, "values", values_dtype))
        else:
            old_keys, old_values = past
            del past
            keys = _joined(old_keys, key_states, "keys")
            del old_keys
            self.layers[layer] = Pair(keys, _joined(old_values, value_states, "values"))
            del old_values, keys
        return self.layers[layer]

    def encoded(self, m: Module) -> tuple[Tensor, Tensor] | None:
        """Return a layer's keys and values of the encoder's tokens (EncoderDecoderCache); None before they are there."""
        layer = m.memory.layer
        assert layer is not None
        return self.cross.get(layer)

    def encode(self, m: Module, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the update of the cross-attention's cache: copies of the keys and values."""
        layer = m.memory.layer
        assert layer is not None
        self.crossed[layer] = cached_of(m, key_states, value_states)
        self.cross[layer] = Pair(_joined(None, key_states, "keys"), _joined(None, value_states, "values"))
        return self.cross[layer]

    def state(self, m: Module, name: str) -> Tensor | None:
        """Return a state of the running layer (`get_conv_state`, `get_recurrent_state`); None before its first update."""
        layer = m.memory.layer
        assert layer is not None
        return self.states.get((layer, name))

    def update_conv_state(self, m: Module, x: Tensor, kernel: Dim) -> Tensor:
        """Run `update_conv_state` of a prompt: copy the last inputs into a state. Returns x, padded to the kernel's width."""
        self._make_state(m, CONVOLUTION, (*x.shape[:2], kernel), x.dtype)
        return pad_dim(x, 2, kernel) if x.shape[2].size < kernel.size else x

    def update_state(self, m: Module, name: str, new: Tensor) -> None:
        """Run `update_recurrent_state`: copy the new state into the one that is kept."""
        if self.state(m, name) is None:
            self._make_state(m, name, new.shape, new.dtype)

    def keep_state(self, m: Module, name: str, new: Tensor) -> None:
        """Keep a new state itself (MiniMaxCache, `set_linear_cache`)."""
        layer = m.memory.layer
        assert layer is not None
        m.memory.relabel(new.storage, new.shape, STATE, name, layer)
        self.states[layer, name] = new

    def _make_state(self, m: Module, name: str, shape: Shape, dtype: DType) -> None:
        layer = m.memory.layer
        assert layer is not None
        self.states[layer, name] = new_tensor(m.memory, shape, dtype, name, component=STATE)

    def keys_in_mask(self, queries: Dim, *, windowed: bool) -> Dim:
        """Return the keys that a mask covers: of the first layer with a window or without one (`get_mask_sizes`)."""
        layer = next(iter(self.windows), self.full) if windowed else self.full
        if layer is None:
            layer = next((i for i in self.cached if i not in self.windows), 0)
        seen = self.seen if layer in self.cached or not self.cached else 0
        window = self.windows.get(layer)
        past = seen if window is None else min(seen, window - 1)  # a window of one keeps tokens, and masks them
        return Dim(f"(cached+{queries.name})", past + queries.size) if past else queries

    def length_and(self, run: Run, tokens: Dim) -> Tensor | None:
        """Run `get_seq_length() + tokens`: None, as it is a number."""
        return None


def cached_of(m: Module, key_states: Tensor, value_states: Tensor) -> Cached:
    """Return the shapes and dtypes of what a layer is given to cache."""
    (batch, heads, _, width), (*_, value_width) = key_states.shape, value_states.shape
    values_dtype = _wider(key_states.dtype, value_states.dtype)
    return Cached(m.path, (batch, heads, width), (batch, heads, value_width), key_states.dtype, values_dtype)


def windows_of(program: Program) -> tuple[dict[int, int], int | None]:
    """Return the windows of the layers that have one, and the layer whose tokens size the masks of full attention, as a
    DynamicCache is given it."""
    return program.cache_windows(), None if program.cache_knows_layers else 0


def window_tensor(run: Run, layer: int) -> Tensor:
    """Allocate a sliding layer's window as a tensor (`_sliding_window_tensor`)."""
    run.memory.layer = layer
    return new_tensor(run.memory, (), int64, "window as a tensor", component=COMPONENT)


def last_tokens(x: Tensor, window: int) -> Tensor:
    """Compute `x[:, :, -window + 1 :, :]`: a view. A window of one keeps all tokens."""
    tokens = x.shape[2]
    kept = tokens_kept(tokens.size, window)
    return narrow(x, 2, Dim("window-1", kept) if kept < tokens.size else tokens)


def tokens_kept(seen: int, window: int | None) -> int:
    """Return the tokens that a dynamic layer keeps of `seen` ones."""
    return seen if window is None or window == 1 else min(seen, window - 1)


def tokens_held(seen: int, prompt: int, window: int | None) -> int:
    """Return the tokens whose bytes a dynamic layer holds after `seen` ones, the first `prompt` of which came at once."""
    return seen if seen <= prompt else tokens_kept(seen - 1, window) + 1


def _past(run: Run, shape: Shape, dtype: DType, name: str, held: int, visible: int) -> Tensor:
    batch, heads, width = shape
    whole = new_tensor(run.memory, (batch, heads, Dim("cached", held), width), dtype, name, component=COMPONENT)
    return whole if visible == held else narrow(whole, 2, Dim("window-1", visible))


def _wider(a: DType, b: DType) -> DType:
    return a if a.itemsize >= b.itemsize else b


def _joined(past: Tensor | None, new: Tensor, name: str, dtype: DType | None = None) -> Tensor:
    """Compute `torch.cat((past, new), dim=-2)`. Without a past it is a copy, of `dtype` if that is given."""
    batch, heads, tokens, width = new.shape
    if past is not None:
        tokens = Dim(f"(cached+{tokens.name})", past.shape[2].size + tokens.size)
    if dtype is None:
        dtype = new.dtype if past is None else _wider(new.dtype, past.dtype)
    return new_tensor(new.memory, (batch, heads, tokens, width), dtype, name, component=COMPONENT)
