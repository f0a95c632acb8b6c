"""transformers' own generation without data: the peak of each step, and the bytes that its cache holds after it.

The reference is the loop of `memcalc.inference.steps`: a forward of the prompts with `use_cache=True` under no_grad, then one
of a token of each sequence at a time; from each only the last logits, copied to fp32, and the next tokens.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from cases import auto_class
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.tracing.modules import cast_tensors, configuration, quiet
from memcalc.tracing.realism import collected_by_hand
from memcalc.validate.live import Live, whole_shapes_uncounted
from memcalc.validate.realism import cuda_kernels, not_traced

sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Seen(NamedTuple):
    """One step: its peak with weights, and the cache after it, its storages and what of them can still be read."""

    peak: int
    held: int
    logical: int


def tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    """Every tensor that an object of transformers, a list or a dict refers to."""
    stack, seen = [thing], set()
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            stack += one
        elif isinstance(one, dict):
            stack += one.values()
        elif type(one).__module__.startswith("transformers"):
            stack += vars(one).values()


def bytes_of(cache: Any) -> tuple[int, int]:
    found = [t for t in tensors_of(cache) if t.device.type != "meta"]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return sum(storages.values()), sum(t.numel() * t.element_size() for t in found)


@contextlib.contextmanager
def without_data(*, encoder_decoder: bool = False) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in (
            FakeTensorMode(allow_non_fake_inputs=True), not_traced(encoder_decoder=encoder_decoder), cuda_kernels(),
            collected_by_hand(), whole_shapes_uncounted(), quiet(), torch.no_grad(),
        ):  # fmt: skip
            stack.enter_context(context)
        yield


def model_of(fields: Mapping[str, Any], attention: str, dtype: str) -> Any:
    config = copy.deepcopy(configuration(fields["model_type"], fields))
    config.use_cache = True
    auto = getattr(transformers, auto_class(fields))
    model = auto.from_config(config, attn_implementation=attention, dtype=DTYPES[dtype])
    cast_tensors(model, DTYPES[dtype])
    return model.eval()


def generated(
    fields: Mapping[str, Any], batch: int, prompt: int, new: int, *, attention: str = "sdpa", dtype: str = "bf16"
) -> list[Seen]:
    """The prefill and `new` decode steps of a causal language model."""
    live, out = Live(), list[Seen]()
    with without_data():
        model = model_of(fields, attention, dtype)
        for tensor in (*model.parameters(), *model.buffers()):
            live.register(tensor)
        ids = torch.zeros((batch, prompt), dtype=torch.int64)
        live.register(ids)
        taken = inspect.signature(model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        name = "cache_params" if "cache_params" in taken else "past_key_values"
        cache = None
        with live:
            for _ in range(new + 1):
                gc.collect()
                live.begin()
                given = {} if cache is None else {name: cache}
                output = model(input_ids=ids, use_cache=True, **given, **last)
                cache = output[name]
                logits = output.logits[:, -1, :].to(copy=True, dtype=torch.float32)
                tokens = torch.argmax(logits, dim=-1)
                del output, logits
                out.append(Seen(live.highest, *bytes_of(cache)))
                ids = torch.zeros((batch, 1), dtype=torch.int64)
                del tokens
    return out


def statically(fields: Mapping[str, Any], batch: int, prompt: int, longest: int) -> int:
    """The bytes of a StaticCache after a prompt."""
    with without_data():
        model = model_of(fields, "sdpa", "bf16")
        cache = transformers.StaticCache(config=model.config, max_cache_len=longest)
        model(input_ids=torch.zeros((batch, prompt), dtype=torch.int64), past_key_values=cache, use_cache=True)
        return bytes_of(cache)[0]


def decoded(fields: Mapping[str, Any], batch: int, prompt: int, new: int, *, attention: str = "sdpa") -> list[Seen]:
    """The encoder with the decoder's first forward, and `new` decode steps. Whisper's prompt is its decoder's."""
    live, out = Live(), list[Seen]()
    with without_data(encoder_decoder=True):
        model = model_of(fields, attention, "bf16")
        config = model.config
        for tensor in (*model.parameters(), *model.buffers()):
            live.register(tensor)
        name, given, start = "input_ids", torch.zeros((batch, prompt), dtype=torch.int64), 1
        if config.model_type == "whisper":
            shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)
            name, given, start = "input_features", torch.zeros(shape, dtype=torch.bfloat16), prompt
        live.register(given)
        with live:
            encoded = model.get_encoder()(**{name: given})
            cache, ids = None, torch.zeros((batch, start), dtype=torch.int64)
            for i in range(new + 1):
                if i:
                    gc.collect()
                    live.begin()
                output = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True, past_key_values=cache)
                cache = output.past_key_values
                logits = output.logits[:, -1, :].to(copy=True, dtype=torch.float32)
                tokens = torch.argmax(logits, dim=-1)
                del output, logits
                out.append(Seen(live.highest, *bytes_of(cache)))
                ids = torch.zeros((batch, 1), dtype=torch.int64)
                del tokens
    return out


def without_a_cache_object(fields: Mapping[str, Any], batch: int, prompt: int, new: int) -> list[int]:
    """The bytes that RWKV's state, or RecurrentGemma's cache and modules, hold after the prompt and after each new token."""
    out = list[int]()
    with without_data():
        model = model_of(fields, "eager", "bf16")
        ids, recurrent = torch.zeros((batch, prompt), dtype=torch.int64), model.config.model_type == "recurrent_gemma"
        cache = transformers.DynamicCache(config=model.config) if recurrent else None
        for i in range(new + 1):
            if recurrent:
                positions = torch.arange(ids.shape[1])[None] + (prompt + i - 1 if i else 0)
                model(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=positions)
                states = [
                    (getattr(m, "conv1d_state", None), getattr(m, "recurrent_states", None)) for m in model.modules()
                ]
                out.append(bytes_of([*cache.layers, *states])[0])
            else:
                cache = model(input_ids=ids, state=cache, use_cache=True).state
                out.append(bytes_of(cache)[0])
            ids = torch.zeros((batch, 1), dtype=torch.int64)
    return out
