"""What transformers' own code and torch's own autograd and optimizers really allocate.

A dispatch mode registers the storage of every op's output and subtracts it when the storage dies. Under fake tensors the
same code runs at any size in seconds and allocates nothing; at small sizes the mode runs over real tensors, which is how
`test_oracle.py` checks the oracle itself.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import AUTO_CLASSES, DROPOUTS, auto_class
from cuda_autocast import cuda_lists_on_the_cpu
from flop_oracle import flops_of
from per_op import CHECKPOINTS
from records import on_record
from timeline import Made
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memcalc.kernels.attention_on_gpu import Fused
from memcalc.tracing.as_on_cuda import run_as_on_cuda
from memcalc.validate.experts import balanced_routing
from memcalc.validate.realism import cuda_kernels, not_traced

DEVICE_OF = torch.ops.prim.device.default


def recomputing() -> bool:
    """Whether backward runs a checkpoint's forward again: it looks at all that is saved, also where an op of one's own runs
    without a graph."""
    return torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that an op returned while the mode was on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.highest = 0
        self.phases = 0
        self._seen: set[int] = set()
        self.forwards: dict[int, int] = {}
        """What a forward has made and is still there: a storage -> its bytes."""
        self.log: list[tuple[str, int, tuple[int, ...]]] | None = None
        self.phase = ""
        self.flops: Counter[str] = Counter()
        self.made: dict[str, list[Made]] = {}

    def kept_of_forward(self, model: Any) -> int:
        """Bytes that a forward has made and that are there after its backward, gradients that are the weights' now left out."""
        gradients = {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
        return sum(nbytes for key, nbytes in self.forwards.items() if key not in gradients)

    def begin(self) -> None:
        """A new phase: forget the peak of the last one."""
        self.highest = self.now
        self.phases += 1

    @property
    def counted(self) -> dict[str, int]:
        """FLOPs by phase, where there are any."""
        return {phase: n for phase, n in self.flops.items() if n}

    def _forget(self, key: int, nbytes: int) -> None:
        self.now -= nbytes
        self._seen.discard(key)
        self.forwards.pop(key, None)

    def register(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return 0
        self._seen.add(key)
        nbytes = storage.nbytes()
        self.now += nbytes
        self.highest = max(self.highest, self.now)
        if self.phase == "forward":
            self.forwards[key] = nbytes
        self.made.setdefault(self.phase, []).append(Made(nbytes, self.now))
        weakref.finalize(storage, self._forget, key, nbytes)
        return nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # FakeTensorMode's own answer; two of three calls of a backward ask for it
        out, temporaries = run_as_on_cuda(func, args, kwargs or {})
        again = self.phase == "backward" and recomputing()
        self.flops["recomputation" if again else self.phase] += flops_of(func, args, kwargs or {}, out)
        for leaf in tree_iter((out, temporaries)):
            if isinstance(leaf, torch.Tensor):
                new = self.register(leaf)
                if self.log is not None and new:
                    self.log.append((str(func), new, tuple(leaf.shape)))
        return out


@dataclass
class Step:
    """Bytes of a steady step of the reference training loop."""

    resident: int  # alive between steps, the batch and the last loss excluded
    saved: int  # made by one forward, alive after it and gone when its backward is over
    forward: int
    backward: int
    step: int
    flops: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    made: dict[str, list[Made]] = field(default_factory=dict, compare=False)
    """Every allocation, by phase; not what two steps are compared by, as real and fake tensors differ in it."""


def build(config: dict[str, Any], attention: str, dtype: torch.dtype, auto: str = "") -> torch.nn.Module:
    """The auto class's model of a config.json's fields, with every dropout off (CPU and CUDA differ in dropout)."""
    import transformers
    from transformers import AutoConfig

    fields = deepcopy(config)
    auto = auto or auto_class(fields)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    for name in DROPOUTS:
        if hasattr(hf_config, name):
            setattr(hf_config, name, 0.0)
    hf_config.use_cache = False
    hf_config._attn_implementation = attention
    model = getattr(transformers, auto).from_config(hf_config, attn_implementation=attention, dtype=dtype)
    for module in model.modules():  # what `model.to(dtype)` does; on fake tensors `.to` itself fails
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
        for name, weight in module._parameters.items():
            if weight is not None and weight.dtype is not dtype:  # some routers are made in fp32
                module._parameters[name] = torch.nn.Parameter(weight.detach().to(dtype), weight.requires_grad)
    return model.train()


@on_record
def training_step(
    config: dict[str, Any],
    *,
    micro_batch_size: int,
    seq_len: int,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.bfloat16,
    recompute: bool | str = False,
    optimizer: str = "adamw",
    implementation: str = "foreach",
    micro_batches: int = 1,
    padded: bool = False,
    autocast: torch.dtype | None = None,
    real: bool = False,
    balanced: bool = False,
    log: bool = False,
    auto: str = "",
    patch: Callable[[torch.nn.Module], None] | None = None,
    recompute_layers: int | None = None,
    fused: Fused | None = None,
) -> Step:
    """The contract's reference step, run twice; the second is reported. Where the first leaves what it found, as without
    optimizer states, it is the second. `patch` is done to the model before; `fused`: the attention kernels of a GPU.

    `recompute`: a key of CHECKPOINTS; True is "full"."""
    mode = LiveBytes()
    lists = contextlib.nullcontext() if autocast is None else cuda_lists_on_the_cpu()
    fake = contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    encoder_decoder = AUTO_CLASSES.get(config["model_type"]) == "AutoModelForSeq2SeqLM"
    with (
        contextlib.nullcontext() if real else not_traced(padded=padded, encoder_decoder=encoder_decoder),
        contextlib.nullcontext() if real else cuda_kernels(fused),
        fake,
        lists,
        balanced_routing() if balanced else contextlib.nullcontext(),
    ):
        model = build(config, attention, dtype, auto)
        if patch is not None:
            patch(model)
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full" if recompute is True else recompute])
        checkpoint_first(model, recompute_layers)
        opt = make_optimizer(optimizer, implementation, list(model.parameters()))
        for tensor in [*model.parameters(), *model.buffers()]:
            mode.register(tensor)
        batch = batch_for(model.config, micro_batch_size, seq_len, dtype)
        if padded:
            speech = batch.get("input_features")
            batch["attention_mask"] = padding_mask(micro_batch_size, seq_len if speech is None else speech.shape[2])
        with mode, sets_in_order(model):
            for tensor in batch.values():
                mode.register(tensor)
            result = None
            loss = torch.zeros(())  # the last step's, which is there until the next one has its own
            for _ in range(2):
                gc.collect()
                mode.log = [] if log else None
                start = mode.now
                mode.flops.clear()
                mode.made.clear()
                saved = forward = backward = 0
                for micro in range(micro_batches):
                    mode.phase = "forward"
                    mode.begin()
                    mode.forwards.clear()
                    with torch.autocast("cpu", autocast, enabled=autocast is not None):
                        out = model(**batch)
                    loss = out.loss
                    del out
                    gc.collect()
                    forward = max(forward, mode.highest)
                    left = sum(mode.forwards.values())
                    mode.phase = "backward"
                    mode.begin()
                    loss.backward()
                    saved = left - mode.kept_of_forward(model) if micro == 0 else saved
                    backward = max(backward, mode.highest)
                flops = mode.counted
                mode.phase = "step"
                mode.begin()
                opt.step()
                opt.zero_grad(set_to_none=True)
                result = Step(start, saved, forward, backward, mode.highest, flops, mode.log or [], dict(mode.made))
                gc.collect()
                if mode.now == start:
                    break
    assert result is not None
    return result


@contextlib.contextmanager
def sets_in_order(model: torch.nn.Module) -> Iterator[None]:
    """Let a model's masks be made in the order of its layers. Some modules of transformers make one for each of
    `set(config.layer_types)`, whose order is another one in every process (PYTHONHASHSEED)."""
    module: Any = sys.modules[type(model).__module__]
    module.set = dict.fromkeys
    try:
        yield
    finally:
        del module.set


def checkpoint_first(model: torch.nn.Module, layers: int | None) -> None:
    """Leave the switch of a GradientCheckpointingLayer on in the first `layers` of the stack alone."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inner = {id(m) for layer in found for m in layer.modules() if m is not layer}
    outer = [layer for layer in found if id(layer) not in inner]
    for layer in [] if layers is None else outer[layers:]:
        for module in layer.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.gradient_checkpointing = False


def batch_for(config: Any, batch: int, seq: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the model is trained on, zeros: tokens that are their own labels, speech with its transcript, or labelled images."""
    ids = torch.zeros((batch, seq), dtype=torch.int64)
    if config.model_type == "whisper":
        features = torch.zeros((batch, config.num_mel_bins, 2 * config.max_source_positions), dtype=dtype)
        return {"input_features": features, "labels": ids}
    if config.model_type == "resnet":
        pixels = torch.zeros((batch, config.num_channels, 224, 224), dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.int64)}
    return {"input_ids": ids, "labels": ids}


def padding_mask(batch: int, seq: int) -> torch.Tensor:
    """A collator's mask of a batch whose first sequence is a token short.

    transformers asks whether a mask has a zero (masking_utils.fast_all, `padding_mask.all()`) before it builds the 4-d
    one. Under fake tensors it asks nothing and takes a mask to have one (is_tracing): the branch of a padded batch.
    """
    mask = torch.ones((batch, seq), dtype=torch.int64)
    mask[0, seq - 1] = 0
    return mask


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
