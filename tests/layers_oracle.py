"""The torch module that a file of layers describes, built from the file alone, and what its training step allocates.

Shapes are those of torch's own forward on the meta device, so nothing here infers one.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from cuda_autocast import cuda_lists_on_the_cpu
from oracle import LiveBytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from memcalc.tracing.realism import gpu_dropout
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


class Linear(nn.Linear):
    """torch adds the bias in place where the rows are not one piece of memory, but not under a dispatch mode (Linear.cpp)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2 or x.is_contiguous() or self.bias is None:
            return super().forward(x)
        return _biased(x, self.weight, self.bias)


def _biased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        bias, weight, x = bias.to(dtype), weight.to(dtype), x.to(dtype)
    return torch.matmul(x, weight.t()).add_(bias)


class Transpose(nn.Module):
    def __init__(self, i: int, j: int) -> None:
        super().__init__()
        self.dims = i, j

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(*self.dims)


class DropoutInPlace(nn.Module):
    """torch's own dropout_, which has no fused kernel on a GPU either (native/Dropout.cpp)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout_(x, self.p, True)


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1]


class Loop(nn.Module):
    """nn.LSTM, nn.GRU or nn.RNN as aten/src/ATen/native/RNN.cpp runs them on a GPU without cuDNN; only the outputs go on.

    The CPU has no fused cells, so their loop is written here. Under fake tensors the cells and their derivatives are torch's.
    """

    def __init__(self, made: nn.RNNBase) -> None:
        super().__init__()
        for name, weight in list(made._parameters.items()):
            self.register_parameter(name, weight)
        self.made = [made]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.made[0]
        ways = 1 + made.bidirectional
        size = made.num_layers * ways, x.shape[0], made.hidden_size
        first = [torch.zeros(size, dtype=x.dtype).unbind(0) for _ in range(1 + (made.mode == "LSTM"))]
        y, last = x.transpose(0, 1), []
        for layer in range(made.num_layers):
            y, ends = self.layer(layer, y, [own[layer * ways :] for own in first])
            last += ends
            if made.dropout and layer < made.num_layers - 1:
                y = nn.functional.dropout(y, made.dropout)
        held = [torch.stack([end[i] for end in last], 0) for i in reversed(range(len(first)))]
        del held
        return y.transpose(0, 1)

    def layer(self, layer: int, x: torch.Tensor, first: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        inputs = x.unbind(0)
        forth, end = self.steps(f"l{layer}", inputs, [own[0] for own in first])
        if not self.made[0].bidirectional:
            return torch.stack(forth, 0), [end]
        whole = torch.stack(forth, 0)
        back, other = self.steps(f"l{layer}_reverse", inputs[::-1], [own[1] for own in first])
        return torch.cat([whole, torch.stack(back[::-1], 0)], -1), [end, other]

    def steps(
        self, name: str, inputs: Any, states: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        out = []
        for x in inputs:
            states = self.step(name, x, states)
            out.append(states[0])
        return out, states

    def step(self, name: str, x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        p, mode = self._parameters, self.made[0].mode
        ih, hh = p[f"weight_ih_{name}"], p[f"weight_hh_{name}"]
        biases = p.get(f"bias_ih_{name}"), p.get(f"bias_hh_{name}")
        if mode.startswith("RNN"):
            total = nn.functional.linear(states[0], hh, biases[1]).add_(nn.functional.linear(x, ih, biases[0]))
            return [torch.tanh(total) if mode == "RNN_TANH" else torch.relu(total)]
        gates = torch.matmul(x, ih.t()), torch.matmul(states[0], hh.t())
        if mode == "LSTM":
            return list(torch.ops.aten._thnn_fused_lstm_cell(*gates, states[1], *biases)[:2])
        return [torch.ops.aten._thnn_fused_gru_cell(*gates, states[0], *biases)[0]]


class WithSquares(LiveBytes):
    """The mean squared error makes the squares within its kernel (native/Loss.cpp), and no dispatcher sees them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.mse_loss.default:
            self.register(torch.empty_like(args[0]))
        return out


@contextlib.contextmanager
def fused_cells() -> Iterator[None]:
    """What native/cuda/RNN.cu allocates for the cells of a GRU, for which torch has no function of sizes alone, and of an LSTM,
    whose own one fails without biases."""
    library = torch.library.Library("aten", "IMPL")

    def lstm(gates: Any, _hidden: Any, cx: Any, _b: Any = None, _c: Any = None) -> Any:
        workspace = torch.empty_like(gates)
        return torch.empty_like(cx), torch.empty_like(cx), workspace

    def forward(gates: Any, _hidden: Any, hx: Any, _b: Any = None, _c: Any = None) -> Any:
        return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))

    def backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
        n, h = grad.shape
        gates = [grad.new_empty((n, 3 * h)) for _ in range(2)]
        biases = [grad.new_empty(3 * h) if has_bias else None for _ in range(2)]
        return (*gates, torch.empty_like(grad), *biases)

    library.impl("_thnn_fused_lstm_cell", lstm, "Meta", allow_override=True)
    library.impl("_thnn_fused_gru_cell", forward, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", backward, "Meta")
    try:
        yield
    finally:
        library._destroy()


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
            return module, (*shape[:-1], module.made[0].hidden_size * (1 + module.made[0].bidirectional))
        ids = isinstance(module, nn.Embedding)
        out = module(torch.zeros(shape, dtype=torch.int64 if ids else torch.float32))
    return module, tuple(out.shape)


def layer(entry: Any, shape: tuple[int, ...]) -> nn.Module:
    """A layer of torch.nn by its name in the notation; `shape` is its input's, with the batch."""
    name, given = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    main = {
        "conv2d": "out", "conv1d": "out", "convtranspose2d": "out", "linear": "out",
        "maxpool2d": "kernel", "avgpool2d": "kernel",
        "adaptiveavgpool2d": "size", "groupnorm": "groups", "relu": "inplace", "dropout": "p", "attention": "heads",
        "transpose": "dims", "lstm": "hidden", "gru": "hidden", "rnn": "hidden", "flatten": "start_dim",
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
        return Linear(shape[-1], o.pop("out"), **o)
    if name == "embedding":
        return nn.Embedding(o["vocab"], o["size"])
    if name == "attention":
        return Attention(shape[-1], **o)
    if name in ("lstm", "gru", "rnn"):
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[name]
        return Loop(kind(shape[-1], o.pop("hidden"), o.pop("layers", 1), batch_first=True, **o))
    if name in torch_activations:
        return torch_activations[name](**o)
    if name == "leakyrelu":
        return nn.LeakyReLU()
    if name == "softmax":
        return nn.Softmax(-1)
    if name == "dropout":
        return DropoutInPlace(o["p"]) if o.get("inplace") else nn.Dropout(**o)
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


def input_of(
    content: dict[str, Any], batch: int, seq: int | None, dtype: torch.dtype
) -> tuple[tuple[int, ...], torch.dtype]:
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
    real: bool = False,
) -> Seen:
    """Run the step of AdamW twice over tensors without data; the second is reported."""
    model, out_shape = module_of(content, batch, seq)
    mode = WithSquares()
    lists = contextlib.nullcontext() if autocast is None else cuda_lists_on_the_cpu()
    with contextlib.ExitStack() as stack:
        for context in (cuda_kernels(None), gpu_dropout(), FakeTensorMode(allow_non_fake_inputs=True), fused_cells()):
            if not real:
                stack.enter_context(context)
        stack.enter_context(lists)
        place(model, dtype).train()
        shape, kind = input_of(content, batch, seq, dtype)
        x, targets = torch.zeros(shape, dtype=kind), targets_of(content, out_shape, dtype)
        opt = torch.optim.AdamW(model.parameters(), foreach=True)
        for tensor in (*model.parameters(), *model.buffers()):
            mode.register(tensor)
        with mode:
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
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
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
    counters = 4 * sum(1 for _ in model.parameters())  # AdamW's `step`, which is on the CPU
    return Seen(*(n if i == 1 else n - counters for i, n in enumerate(seen[:5])), seen.flops)


def place(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """What `model.to(dtype)` does; on fake tensors `.to` itself fails."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                made = torch.empty(weight.shape, dtype=dtype)
                module._parameters[name] = nn.Parameter(made)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = torch.zeros(buffer.shape, dtype=kind)
    return model


def flops_of(content: dict[str, Any], batch: int, seq: int | None = None) -> dict[str, int]:
    """The FLOPs that torch's own counter sees in forward and in both passes."""
    counts: Counter[str] = Counter()
    model, out_shape = module_of(content, batch, seq)
    with FakeTensorMode(allow_non_fake_inputs=True):
        place(model, torch.float32)
        shape, kind = input_of(content, batch, seq, torch.float32)
        x, targets = torch.zeros(shape, dtype=kind), targets_of(content, out_shape, torch.float32)
        with FlopCounterMode(display=False) as counter:
            loss = loss_of(content, model(x), targets)
            counts["forward"] = counter.get_total_flops()
            loss.backward()
            counts["total"] = counter.get_total_flops()
    return dict(counts)
