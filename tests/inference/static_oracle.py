"""transformers' own generation with a StaticCache, without data: the peak of each step, and the bytes of the cache after it."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from generation_oracle import Seen, bytes_of, model_of, without_data
from transformers.cache_utils import StaticLayer

from memcalc.validate.live import Live


@contextlib.contextmanager
def numbers_on_the_device(live: Live) -> Iterator[None]:
    """Count a layer's number of tokens from its first update on, which moves it from the CPU to the GPU."""
    own = StaticLayer.lazy_initialization

    def moved(self: Any, *states: torch.Tensor) -> None:
        own(self, *states)
        live.register(self.cumulative_length)

    StaticLayer.lazy_initialization = moved
    try:
        yield
    finally:
        StaticLayer.lazy_initialization = own


def statically_generated(
    fields: Mapping[str, Any], batch: int, prompt: int, longest: int, new: int, *, attention: str = "sdpa"
) -> list[Seen]:
    """The prefill and `new` decode steps of a causal language model whose cache has room for `longest` tokens."""
    live, out = Live(), list[Seen]()
    with without_data():
        model = model_of(fields, attention, "bf16")
        for tensor in (*model.parameters(), *model.buffers()):
            live.register(tensor)
        cache = transformers.StaticCache(config=model.config, max_cache_len=longest)
        taken = inspect.signature(model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        name = "cache_params" if "cache_params" in taken else "past_key_values"
        ids = torch.zeros((batch, prompt), dtype=torch.int64)
        live.register(ids)
        with live, numbers_on_the_device(live):
            for _ in range(new + 1):
                gc.collect()
                live.begin()
                output = model(input_ids=ids, use_cache=True, **{name: cache}, **last)
                logits = output.logits[:, -1, :].to(copy=True, dtype=torch.float32)
                tokens = torch.argmax(logits, dim=-1)
                del output, logits
                out.append(Seen(live.highest, *bytes_of(cache)))
                ids = torch.zeros((batch, 1), dtype=torch.int64)
                del tokens
    return out
