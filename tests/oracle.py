"""What transformers' own code and torch's own autograd and optimizers really allocate.

A dispatch mode registers the storage of every op's output and subtracts it when the storage dies. Under fake tensors the
same code runs at any size in seconds and allocates nothing; at small sizes the mode runs over real tensors, which is how
`test_oracle.py` checks the oracle itself.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that an op returned while the mode was on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.highest = 0
        self.phases = 0
        self._seen: set[int] = set()
        self.log: list[tuple[str, int, tuple[int, ...]]] | None = None

    def begin(self) -> None:
        """A new phase: forget the peak of the last one."""
        self.highest = self.now
        self.phases += 1

    def _forget(self, key: int, nbytes: int) -> None:
        self.now -= nbytes
        self._seen.discard(key)

    def register(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return 0
        self._seen.add(key)
        nbytes = storage.nbytes()
        self.now += nbytes
        self.highest = max(self.highest, self.now)
        weakref.finalize(storage, self._forget, key, nbytes)
        return nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                new = self.register(leaf)
                if self.log is not None and new:
                    self.log.append((str(func), new, tuple(leaf.shape)))
        return out


@dataclass
class Step:
    """Bytes of the second step of the reference training loop."""

    resident: int  # alive between steps, the batch and the last loss excluded
    saved: int  # alive after one forward and not before it, without the loss itself
    forward: int
    backward: int
    step: int
    log: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)


@contextlib.contextmanager
def not_traced() -> Iterator[None]:
    """Under fake tensors transformers believes that it is being compiled and builds a mask that a real run skips."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def build(config: dict[str, Any], attention: str, dtype: torch.dtype) -> torch.nn.Module:
    """`AutoModelForCausalLM` of a config.json's fields, with every dropout off (CPU and CUDA differ in dropout)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout", "hidden_dropout"):
        if hasattr(hf_config, name):
            setattr(hf_config, name, 0.0)
    hf_config.use_cache = False
    hf_config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention, dtype=dtype)
    for module in model.modules():  # what `model.to(dtype)` does to buffers; on fake tensors `.to` itself fails
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
    return model.train()


def training_step(
    config: dict[str, Any],
    *,
    micro_batch_size: int,
    seq_len: int,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.bfloat16,
    recompute: bool = False,
    optimizer: str = "adamw",
    implementation: str = "foreach",
    micro_batches: int = 1,
    real: bool = False,
    log: bool = False,
    patch: Callable[[torch.nn.Module], None] | None = None,
) -> Step:
    """The contract's reference step, run twice; the second is reported. `patch` is done to the model before."""
    mode = LiveBytes()
    fake = contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with not_traced() if not real else contextlib.nullcontext(), fake:
        model = build(config, attention, dtype)
        if patch is not None:
            patch(model)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        opt = make_optimizer(optimizer, implementation, list(model.parameters()))
        for tensor in [*model.parameters(), *model.buffers()]:
            mode.register(tensor)
        ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
        with mode:
            mode.register(ids)
            result = None
            loss: torch.Tensor | None = None
            for turn in range(2):
                gc.collect()
                if log and turn:
                    mode.log = []
                start = mode.now
                saved = forward = backward = 0
                for micro in range(micro_batches):
                    before = mode.now
                    mode.begin()
                    out = model(input_ids=ids, labels=ids)
                    loss = out.loss
                    del out
                    gc.collect()
                    forward = max(forward, mode.highest)
                    saved = mode.now - before if micro == 0 else saved
                    mode.begin()
                    loss.backward()
                    backward = max(backward, mode.highest)
                mode.begin()
                opt.step()
                opt.zero_grad(set_to_none=True)
                result = Step(start, saved, forward, backward, mode.highest, mode.log or [])
    assert result is not None
    return result


def make_optimizer(name: str, implementation: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    flags = {"foreach": implementation == "foreach"}
    if name in ("adam", "adamw", "sgd", "sgd-momentum"):
        flags["fused"] = implementation == "fused"
    if name == "adamw":
        return torch.optim.AdamW(parameters, **flags)
    if name == "adam":
        return torch.optim.Adam(parameters, **flags)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, **flags)
    if name == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **flags)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, **flags)
    raise ValueError(name)
