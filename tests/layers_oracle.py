"""The torch module that a file of layers describes, built from the file alone, and what its training step allocates.

Shapes are those of torch's own forward on the meta device, so nothing here infers one.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import Any, NamedTuple

import torch
from cuda_autocast import cuda_lists_on_the_cpu
from oracle import LiveBytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from memcalc.validate.realism import cuda_kernels

torch_activations = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


class Residual(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + (x if self.shortcut is None else self.shortcut(x))


class Concat(nn.Module):
    def __init__(self, branches: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.branches, self.dim = nn.ModuleList(branches), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], self.dim)


class Attention(nn.Module):
    def __init__(self, size: int, heads: int, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size, bias), nn.Linear(size, size, bias)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Transpose(nn.Module):
    def __init__(self, i: int, j: int) -> None:
        super().__init__()
        self.dims = i, j

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(*self.dims)


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1]


class Loop(nn.Module):
    """nn.LSTM or nn.RNN without cuDNN; only the outputs go on."""

    def __init__(self, made: nn.RNNBase) -> None:
        super().__init__()
        for name, weight in list(made._parameters.items()):
            self.register_parameter(name, weight)
        self.held = [made]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.held[0]
        for name, weight in self._parameters.items():
            made._parameters[name] = weight
        made._flat_weights = list(self._parameters.values())
        return made(x)[0]


def sequential(entries: list[Any], shape: tuple[int, ...]) -> tuple[nn.Sequential, tuple[int, ...]]:
    """The nn.Sequential of a list, and the shape that comes out, both with a batch."""
    made: list[nn.Module] = []
    for entry in entries:
        module, shape = one(entry, shape)
        made.append(module)
    return nn.Sequential(*made), shape


def one(entry: Any, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[int, ...]]:
    if isinstance(entry, dict) and "repeat" in entry:
        passes = []
        for _ in range(entry["repeat"]):
            module, shape = sequential(entry["layers"], shape)
            passes.append(module)
        return nn.Sequential(*passes), shape
    if isinstance(entry, dict) and "sequential" in entry:
        return sequential(entry["sequential"], shape)
    if isinstance(entry, dict) and "residual" in entry:
        body, out = sequential(entry["residual"], shape)
        short = sequential(entry["shortcut"], shape)[0] if "shortcut" in entry else None
        return Residual(body, short), out
    if isinstance(entry, dict) and "concat" in entry:
        parts = [sequential(branch, shape) for branch in entry["concat"]]
        dim = entry.get("dim", 1)
        out = list(parts[0][1])
        out[dim] = sum(part[1][dim] for part in parts)
        return Concat([part[0] for part in parts], dim), tuple(out)
    with torch.device("meta"), torch.no_grad():
        module = layer(entry, shape)
        if isinstance(module, Loop):
            return module, (*shape[:-1], module.held[0].hidden_size * (1 + module.held[0].bidirectional))
        ids = isinstance(module, nn.Embedding)
        out = module(torch.zeros(shape, dtype=torch.int64 if ids else torch.float32))
    return module, tuple(out.shape)


def layer(entry: Any, shape: tuple[int, ...]) -> nn.Module:
    """A layer of torch.nn by its name in the notation; `shape` is its input's, with the batch."""
    name, given = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    main = {
        "conv2d": "out", "conv1d": "out", "convtranspose2d": "out", "linear": "out", "maxpool2d": "kernel", "avgpool2d": "kernel",
        "adaptiveavgpool2d": "size", "groupnorm": "groups", "relu": "inplace", "dropout": "p", "attention": "heads",
        "transpose": "dims", "lstm": "hidden", "rnn": "hidden", "flatten": "start_dim",
    }  # fmt: skip
    o = dict(given) if isinstance(given, dict) else {main[name]: given}
    if name in ("conv2d", "conv1d", "convtranspose2d"):
        kind = {"conv2d": nn.Conv2d, "conv1d": nn.Conv1d, "convtranspose2d": nn.ConvTranspose2d}[name]
        return kind(shape[1], o.pop("out"), o.pop("kernel"), **o)
    if name in ("maxpool2d", "avgpool2d"):
        return {"maxpool2d": nn.MaxPool2d, "avgpool2d": nn.AvgPool2d}[name](o.pop("kernel"), **o)
    if name == "adaptiveavgpool2d":
        return nn.AdaptiveAvgPool2d(o.get("size", 1))
    if name in ("batchnorm1d", "batchnorm2d"):
        return {"batchnorm1d": nn.BatchNorm1d, "batchnorm2d": nn.BatchNorm2d}[name](shape[1])
    if name == "syncbatchnorm":
        return nn.SyncBatchNorm(shape[1])
    if name == "layernorm":
        return nn.LayerNorm(shape[-1])
    if name == "groupnorm":
        return nn.GroupNorm(o.pop("groups"), shape[1], **o)
    if name == "linear":
        return nn.Linear(shape[-1], o.pop("out"), **o)
    if name == "embedding":
        return nn.Embedding(o["vocab"], o["size"])
    if name == "attention":
        return Attention(shape[-1], **o)
    if name in ("lstm", "rnn"):
        kind = {"lstm": nn.LSTM, "rnn": nn.RNN}[name]
        return Loop(kind(shape[-1], o.pop("hidden"), o.pop("layers", 1), batch_first=True, **o))
    if name in torch_activations:
        return torch_activations[name](**o)
    if name == "leakyrelu":
        return nn.LeakyReLU()
    if name == "softmax":
        return nn.Softmax(-1)
    if name == "dropout":
        return nn.Dropout(**o)
    if name == "flatten":
        return nn.Flatten(o.get("start_dim", 1))
    if name == "transpose":
        return Transpose(*o["dims"])
    if name == "last":
        return Last()
    if name == "identity":
        return nn.Identity()
    raise ValueError(name)


class Seen(NamedTuple):
    """What a steady step has allocated: bytes."""

    resident: int
    saved: int
    forward: int
    backward: int
    step: int
    flops: dict[str, int]


def input_of(content: dict[str, Any], batch: int, seq: int | None, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    given = content["input"]
    if given == "tokens":
        return (batch, seq or 0), torch.int64
    if isinstance(given, dict):
        return (batch, *given["ids"]), torch.int64
    given = [given] if isinstance(given, int) else given
    return (batch, *(seq if size == "seq" else size for size in given)), dtype  # type: ignore[misc]


def module_of(content: dict[str, Any], batch: int = 2, seq: int | None = None) -> tuple[nn.Sequential, tuple[int, ...]]:
    """The module of a file's content and the shape of its output."""
    shape, _ = input_of(content, batch, seq, torch.float32)
    return sequential(content["layers"], shape)


def loss_of(content: dict[str, Any], out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if content.get("loss", "cross-entropy") == "mse":
        return nn.functional.mse_loss(out, targets)
    if out.dim() == 3:
        return nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())
    return nn.functional.cross_entropy(out, targets)


def targets_of(content: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if content.get("loss", "cross-entropy") == "mse":
        return torch.zeros(shape, dtype=dtype)
    places = shape[:-1] if len(shape) == 3 else (shape[0], *shape[2:])
    return torch.zeros(places, dtype=torch.int64)


def step_of(
    content: dict[str, Any],
    *,
    batch: int,
    seq: int | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> Seen:
    """Run the step of AdamW twice over tensors without data; the second is reported."""
    model, out_shape = module_of(content, batch, seq)
    mode = LiveBytes()
    lists = contextlib.nullcontext() if autocast is None else cuda_lists_on_the_cpu()
    with cuda_kernels(None), FakeTensorMode(allow_non_fake_inputs=True), lists:
        with torch.device(device):
            place(model, dtype, device).train()
            shape, kind = input_of(content, batch, seq, dtype)
            x, targets = torch.zeros(shape, dtype=kind), targets_of(content, out_shape, dtype)
        opt = torch.optim.AdamW(model.parameters(), foreach=True)
        for tensor in (*model.parameters(), *model.buffers()):
            mode.register(tensor)
        with mode, torch.backends.cudnn.flags(enabled=False):
            mode.register(x)
            mode.register(targets)
            loss = torch.zeros(())
            seen = None
            for _ in range(2):
                gc.collect()
                start = mode.now
                mode.phase = "forward"
                mode.begin()
                mode.forwards.clear()
                mode.flops.clear()
                with torch.autocast(device, autocast, enabled=autocast is not None):
                    loss = loss_of(content, model(x), targets)
                gc.collect()
                left, forward = sum(mode.forwards.values()), mode.highest
                mode.phase = "backward"
                mode.begin()
                loss.backward()
                saved, backward = left - mode.kept_of_forward(model), mode.highest
                flops = mode.counted
                mode.phase = "step"
                mode.begin()
                opt.step()
                opt.zero_grad(set_to_none=True)
                seen = Seen(start, saved, forward, backward, mode.highest, flops)
    assert seen is not None
    return seen


def place(model: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """What `model.to(device, dtype)` does; on fake tensors `.to` itself fails."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                made = torch.empty(weight.shape, dtype=dtype, device=device)
                module._parameters[name] = nn.Parameter(made)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = torch.zeros(buffer.shape, dtype=kind, device=device)
    return model


def flops_of(content: dict[str, Any], batch: int, seq: int | None = None) -> dict[str, int]:
    """The FLOPs that torch's own counter sees in forward and in both passes."""
    counts: Counter[str] = Counter()
    model, out_shape = module_of(content, batch, seq)
    with FakeTensorMode(allow_non_fake_inputs=True):
        place(model, torch.float32, "cpu")
        shape, kind = input_of(content, batch, seq, torch.float32)
        x, targets = torch.zeros(shape, dtype=kind), targets_of(content, out_shape, torch.float32)
        with FlopCounterMode(display=False) as counter:
            loss = loss_of(content, model(x), targets)
            counts["forward"] = counter.get_total_flops()
            loss.backward()
            counts["total"] = counter.get_total_flops()
    return dict(counts)
