"""Generation of types whose states no cache object has, or whose bytes depend on routing: RWKV, RecurrentGemma and DBRX."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from generation_oracle import Seen, bytes_of, model_of, without_data
from inference.static_oracle import numbers_on_the_device

from memcalc.tracing.modules import quiet
from memcalc.tracing.realism import collected_by_hand
from memcalc.validate.experts import balanced_routing
from memcalc.validate.live import Live
from memcalc.validate.realism import cuda_kernels


@contextlib.contextmanager
def with_data() -> Iterator[None]:
    """Real tensors, whose tokens go to the experts in turn."""
    with contextlib.ExitStack() as stack:
        for context in (balanced_routing(), cuda_kernels(), collected_by_hand(), quiet(), torch.no_grad()):
            stack.enter_context(context)
        yield


def _states(model: Any) -> list[Any]:
    return [(getattr(m, "conv1d_state", None), getattr(m, "recurrent_states", None)) for m in model.modules()]


def generated_with_states(
    fields: Mapping[str, Any],
    batch: int,
    prompt: int,
    new: int,
    *,
    attention: str = "eager",
    longest: int | None = None,
) -> list[Seen]:
    """The prefill and `new` decode steps. RWKV returns its state; RecurrentGemma's is in its modules beside a DynamicCache, or
    a StaticCache of `longest` tokens."""
    model_type, live, out = fields["model_type"], Live(), list[Seen]()
    with with_data() if model_type == "dbrx" else without_data():
        model = model_of(fields, attention, "bf16")
        for tensor in (*model.parameters(), *model.buffers()):
            live.register(tensor)
        ids = torch.zeros((batch, prompt), dtype=torch.int64)
        live.register(ids)
        name = "state" if model_type == "rwkv" else "past_key_values"
        cache = None
        if longest is not None:
            cache = transformers.StaticCache(config=model.config, max_cache_len=longest)
        elif model_type != "rwkv":
            cache = transformers.DynamicCache(config=model.config)
            for tensor in tensors_on_the_device(cache):
                live.register(tensor)
        with live, numbers_on_the_device(live):
            for _ in range(new + 1):
                gc.collect()
                live.begin()
                given = {} if cache is None else {name: cache}
                output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
                cache = output[name] if model_type == "rwkv" else cache
                logits = output.logits[:, -1, :].to(copy=True, dtype=torch.float32)
                tokens = torch.argmax(logits, dim=-1)
                del output, logits
                held = [cache, *_states(model)] if model_type == "rwkv" else [*cache.layers, *_states(model)]
                out.append(Seen(live.highest, *bytes_of(held)))
                del held
                ids = torch.zeros((batch, 1), dtype=torch.int64)
                del tokens
    return out


def tensors_on_the_device(cache: Any) -> list[torch.Tensor]:
    """The windows that a cache has as tensors from the start."""
    return [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
