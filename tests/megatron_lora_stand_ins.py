"""Megatron-Bridge's LoRA and Transformer Engine's linear layers for Megatron-Core's GPTModel, on the CPU.

The adapter is ParallelLinearAdapter of Megatron-Bridge (megatron/bridge/peft/utils.py) for LoRA, built of Megatron-Core's own
layers; test_bridge_adapters.py holds it against the real one where that is installed. The linear layers are written after
Transformer Engine 2.11 (pytorch/module/layernorm_linear.py and linear.py, bf16 without user buffers): what they save, allocate
and send. Nothing is computed but products. Norms have stand-ins, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """gather_along_first_dim."""
    out = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype)
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """reduce_scatter_along_first_dim."""
    out = torch.empty((x.shape[0] // group.size(), *x.shape[1:]), dtype=x.dtype)
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _norm_backward(dgrad: torch.Tensor, x: torch.Tensor, layer_norm: bool) -> Any:
    """tex.layernorm_bwd or rmsnorm_bwd."""
    return torch.empty_like(dgrad), torch.empty_like(x[0]), torch.empty_like(x[0]) if layer_norm else None


class LayerNormLinear(Function):
    """_LayerNormLinear with parallel_mode "column"."""

    @staticmethod
    def forward(ctx: Any, inp: Any, ln_weight: Any, ln_bias: Any, weight: Any, bias: Any, m: Any) -> Any:
        inp_shape = inp.shape
        inputmat = inp.reshape(-1, inp_shape[-1])
        ln_out = torch.empty_like(inputmat)
        statistics = [torch.empty(inputmat.shape[0], dtype=torch.float32) for _ in range(1 if ln_bias is None else 2)]
        gathers = m.sequence_parallel
        ln_out_return = ln_out if m.return_layernorm_output else None
        ln_out_total = ln_out
        if gathers:
            ln_out_total = gathered(ln_out, m.group)
            if m.return_layernorm_output_gathered:
                ln_out_return = ln_out_total
        out = torch.matmul(ln_out_total, weight.t())  # with its bias
        if not weight.requires_grad and not m.return_layernorm_output:
            ln_out = ln_out_total = None
        elif gathers and not m.return_layernorm_output_gathered:
            ln_out_total = None
        ctx.save_for_backward(inputmat, weight, bias, ln_weight, ln_out, *statistics)
        ctx.m, ctx.requires_dgrad, ctx.requires_wgrad = m, inp.requires_grad, weight.requires_grad
        ctx.inp_shape, ctx.layer_norm = inp_shape, ln_bias is not None
        out = out.view(-1, *inp_shape[1:-1], weight.shape[0])
        if m.return_layernorm_output:
            return out, ln_out_return.view(-1, *inp_shape[1:])
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        inputmat, weight, bias, _ln_weight, ln_out, *_statistics = ctx.saved_tensors
        m = ctx.m
        grad_output = grad_outputs[0].reshape(-1, weight.shape[0])
        ln_out_total = ln_out
        if ctx.requires_wgrad and m.sequence_parallel:
            ln_out_total = gathered(ln_out, m.group)
        gemm_out = torch.matmul(grad_output, weight)
        dgrad = gemm_out
        if m.group.size() > 1:
            if m.sequence_parallel:
                dgrad = scattered(dgrad, m.group)
            else:
                dist.all_reduce(dgrad, group=m.group)
        wgrad = grad_bias = None
        if ctx.requires_wgrad:
            wgrad = torch.matmul(grad_output.t(), ln_out_total)
            grad_bias = None if bias is None else torch.empty_like(bias)
        dgrad = dgrad.view(inputmat.shape)
        if m.return_layernorm_output and not m.return_layernorm_output_gathered:
            dgrad = dgrad + grad_outputs[1].view_as(dgrad)
        dgrad, dgamma, dbeta = _norm_backward(dgrad, inputmat, ctx.layer_norm)
        return dgrad.view(ctx.inp_shape) if ctx.requires_dgrad else None, dgamma, dbeta, wgrad, grad_bias, None


class TELayerNormColumnParallelLinear(torch.nn.Module):
    def __init__(self, input_size: int, output_size: int, *, config: Any, bias: bool, skip_bias_add: bool, tp_group: Any = None,
                 **_: Any) -> None:  # fmt: skip
        super().__init__()
        from megatron.core import parallel_state

        self.group = tp_group or parallel_state.get_tensor_model_parallel_group()
        self.config, self.sequence_parallel = config, config.sequence_parallel
        self.in_features, self.out_features = input_size, output_size // self.group.size()
        self.return_layernorm_output = self.return_layernorm_output_gathered = False
        self.skips_bias = skip_bias_add and bias
        make = lambda *shape: torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))  # noqa: E731
        self.weight = make(self.out_features, input_size)
        self.bias = make(self.out_features) if bias else None
        self.layer_norm_weight = make(input_size)
        self.layer_norm_bias = make(input_size) if config.normalization == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> Any:
        bias = None if self.skips_bias else self.bias
        out = LayerNormLinear.apply(x, self.layer_norm_weight, self.layer_norm_bias, self.weight, bias, self)
        if not self.skips_bias:
            return out, None
        return (out[0], self.bias, out[1]) if self.return_layernorm_output else (out, self.bias)


class RowLinear(Function):
    """_Linear with parallel_mode "row"."""

    @staticmethod
    def forward(ctx: Any, inp: Any, weight: Any, m: Any) -> Any:
        ctx.save_for_backward(inp if weight.requires_grad else None, weight)
        ctx.m, ctx.requires_dgrad = m, inp.requires_grad
        out = torch.matmul(inp, weight.t())
        if m.group.size() > 1:
            if m.config.sequence_parallel:
                out = scattered(out, m.group)
            else:
                dist.all_reduce(out, group=m.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        inputmat, weight = ctx.saved_tensors
        if ctx.m.config.sequence_parallel:
            grad_output = gathered(grad_output, ctx.m.group)
        dgrad = torch.matmul(grad_output, weight) if ctx.requires_dgrad else None
        wgrad = None
        if weight.requires_grad:
            wgrad = torch.matmul(grad_output.reshape(-1, weight.shape[0]).t(), inputmat.reshape(-1, weight.shape[1]))
        return dgrad, wgrad, None


class TERowParallelLinear(torch.nn.Module):
    def __init__(
        self, input_size: int, output_size: int, *, config: Any, bias: bool, tp_group: Any = None, **_: Any
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.group = tp_group or parallel_state.get_tensor_model_parallel_group()
        self.config = config
        self.in_features, self.out_features = input_size // self.group.size(), output_size
        self.weight = torch.nn.Parameter(torch.empty(output_size, self.in_features, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(output_size, dtype=config.params_dtype)) if bias else None

    def forward(self, x: torch.Tensor) -> Any:
        return RowLinear.apply(x, self.weight, self), self.bias


class Adapter(torch.nn.Module):
    """ParallelLinearAdapter with the identity as its activation, beside a layer that is no expert's.

    `gathers`: the adapter gathers its input (not `disable_sequence_parallel_comm`), as beside Megatron-Core's own layers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dim: int,
        config: Any,
        *,
        input_is_parallel: bool,
        dropout: float,
        gathers: bool,
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        self.group = parallel_state.get_tensor_model_parallel_group()
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        how: Any = {"config": config, "bias": False, "init_method": torch.nn.init.zeros_, "tp_group": self.group}
        if input_is_parallel:
            self.linear_in = RowParallelLinear(in_features, dim, input_is_parallel=True, skip_bias_add=True, **how)
        else:
            reduces = {"gather_output": True, "disable_grad_reduce": sequence_parallel}
            self.linear_in = ColumnParallelLinear(in_features, dim, **reduces, **how)
        self.linear_out = ColumnParallelLinear(dim, out_features, gather_output=input_is_parallel, **how)
        self.dropout = torch.nn.Dropout(dropout) if dropout > 0 else torch.nn.Identity()
        config.sequence_parallel = sequence_parallel
        self.input_is_parallel, self.dim = input_is_parallel, dim
        self.disable_sequence_parallel_comm = not (sequence_parallel and (gathers or input_is_parallel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        x = self.dropout(x)
        if not self.disable_sequence_parallel_comm and not self.input_is_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.group)
        x, _ = self.linear_in(x)
        x, _ = self.linear_out(x)
        if not self.disable_sequence_parallel_comm and self.input_is_parallel:
            x = mappings.scatter_to_sequence_parallel_region(x, group=self.group)
        return x * (32 / self.dim)


class LoRALinear(torch.nn.Module):
    """LoRALinear of megatron/bridge/peft/lora_layers.py, with AdapterWrapper.base_linear_forward."""

    def __init__(self, to_wrap: torch.nn.Module, adapter: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def base_linear_forward(self, x: torch.Tensor) -> Any:
        linear_output = self.to_wrap(x)
        bias, layernorm_output = None, x
        if len(linear_output) == 2:
            linear_output, bias = linear_output
            if isinstance(linear_output, tuple):
                linear_output, layernorm_output = linear_output
        else:
            linear_output, bias, layernorm_output = linear_output
        return linear_output, bias, layernorm_output

    def forward(self, x: torch.Tensor) -> Any:
        linear_output, bias, layernorm_output = self.base_linear_forward(x)
        adapter_output = self.adapter_forward(layernorm_output.contiguous())
        adapter_output = adapter_output.reshape(linear_output.shape)
        combined = linear_output + adapter_output
        return combined, bias

    def adapter_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x)


def adapted(m: torch.nn.Module, dim: int, dropout: float) -> LoRALinear:
    """LoRA.transform with get_adapter_attributes_from_linear, for Transformer Engine's layers."""
    ranks = m.group.size()  # type: ignore[union-attr,operator]
    how: Any = {"dim": dim, "config": m.config, "dropout": dropout}
    if isinstance(m, TELayerNormColumnParallelLinear):
        m.return_layernorm_output = True
        m.return_layernorm_output_gathered = m.sequence_parallel
        made = Adapter(m.in_features, m.out_features * ranks, input_is_parallel=False, gathers=False, **how)
    else:
        made = Adapter(m.in_features * ranks, m.out_features, input_is_parallel=True, gathers=True, **how)  # type: ignore[operator,arg-type]
    return LoRALinear(m, made)
