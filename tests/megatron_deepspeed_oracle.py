"""DeepSpeed's engine around a GPT of Megatron's tensor-parallel layers, any rank of a `fake` process group, on CPU tensors.

The linear layers and the embedding are Megatron-Core's own (megatron/core/tensor_parallel/layers.py); the layer around them
is in the manner of Megatron-DeepSpeed's ParallelTransformerLayer, with functions that save and allocate what its fused
kernels do in the place of the kernels. DeepSpeed is the real one: its engine, its optimizers, its pipeline.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed_oracle
import torch
import torch.distributed as dist
from deepspeed_oracle import RankMode, configuration
from megatron_stand_ins import FlashKernel, LayerNorm, RMSNorm
from records import on_record
from torch import nn
from torch.autograd import Function

from memcalc.families.base.architecture import Architecture

Sent = Counter[tuple[str, str, int, int]]
"""(collective, dtype, ranks of the group, elements of the full tensor) -> calls."""


class Mode(RankMode):
    """Live bytes of one rank, and what it sends to whom."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Sent = Counter()

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "barrier":
            return
        kind = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
                "broadcast_": "broadcast", "send": "send", "recv_": "receive"}[name]  # fmt: skip
        whole = args[1] if kind == "reduce_scatter" else args[0]
        tensors = whole if isinstance(whole, (list, tuple)) else [whole]
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
        size = dist.ProcessGroup.unbox(groups[0]).size()
        if kind == "receive":
            return
        size = 2 if kind == "send" else size
        if size > 1:  # alone in a group, it sends to itself
            self.calls[kind, dtype, size, sum(t.numel() for t in tensors)] += 1


# --- kernels


class BiasGeLU(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, bias = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(bias)


class BiasAdd(Function):
    """Bias, dropout of probability 0 and the residual."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.bias = bias is not None
        return torch.empty_like(residual)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad, grad.new_zeros(grad.shape[-1]) if ctx.bias else None


class CrossEntropy(Function):
    """One rank of the vocabulary's: a copy of the logits less their maximum, and its exponentials, which are saved."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        width = logits.shape[-1]
        highest = logits.max(dim=-1)[0]
        dist.all_reduce(highest, group=group)
        less = logits - highest.unsqueeze(-1)
        outside = (target < 0) | (target >= width)
        own = target.clone() - 0
        rows = torch.arange(own.numel())
        of_target = less.view(-1, width)[rows, own.view(-1)].clone()
        dist.all_reduce(of_target, group=group)
        softmax = torch.exp(less)
        sums = softmax.sum(-1)
        dist.all_reduce(sums, group=group)
        losses = torch.log(sums) - of_target.view_as(target)
        softmax.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside, own.view(-1))
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, outside, own = ctx.saved_tensors
        rows = torch.arange(own.numel())
        update = 1.0 - outside.view(-1).float()
        of_target = softmax.view(-1, softmax.shape[-1])[rows, own]
        of_target -= update
        return softmax.mul_(grad.unsqueeze(-1)), None, None


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


# --- modules


class Norm(nn.Module):
    def __init__(self, width: int, *, rms: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None if rms else nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNorm.apply(x, self.weight) if self.bias is None else LayerNorm.apply(x, self.weight, self.bias)


def _config(a: Architecture, tp: int) -> Any:
    from megatron.core.model_parallel_config import ModelParallelConfig

    return ModelParallelConfig(
        tensor_model_parallel_size=tp, use_cpu_initialization=True, perform_initialization=False,
        params_dtype=torch.float32, gradient_accumulation_fusion=False,
    )  # fmt: skip


class Layer(nn.Module):
    def __init__(self, a: Architecture, tp: int) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.a, config = a, _config(a, tp)
        self.heads, self.kv_heads = a.heads // tp, a.kv_heads // tp

        def column(out: int, bias: bool, skip: bool) -> Any:
            return ColumnParallelLinear(a.hidden, out, config=config, init_method=nn.init.normal_, bias=bias,
                                        gather_output=False, skip_bias_add=skip)  # fmt: skip

        def row(given: int) -> Any:
            return RowParallelLinear(given, a.hidden, config=config, init_method=nn.init.normal_, bias=a.linear_bias,
                                     input_is_parallel=True, skip_bias_add=True)  # fmt: skip

        self.input_layernorm = Norm(a.hidden, rms=a.rms_norm)
        self.linear_qkv = column((a.heads + 2 * a.kv_heads) * a.head_dim, a.qkv_bias, skip=False)
        self.linear_proj = row(a.heads * a.head_dim)
        self.pre_mlp_layernorm = Norm(a.hidden, rms=a.rms_norm)
        self.linear_fc1 = column(2 * a.ffn if a.gated else a.ffn, a.linear_bias, skip=True)
        self.linear_fc2 = row(a.ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        normed = self.input_layernorm(x)
        attended, bias = self.attention(normed)
        x = BiasAdd.apply(attended, residual, bias)
        residual = x
        normed = self.pre_mlp_layernorm(x)
        out, bias = self.mlp(normed)
        return BiasAdd.apply(out, residual, bias)

    def attention(self, x: torch.Tensor) -> Any:
        a = self.a
        mixed, _ = self.linear_qkv(x)
        s, b, _ = mixed.shape
        wide, narrow = self.heads * a.head_dim, self.kv_heads * a.head_dim
        q, k, v = mixed.split([wide, narrow, narrow], dim=-1)
        q, k, v = (t.view(s, b, -1, a.head_dim) for t in (q, k, v))
        k, v = self.repeated(k), self.repeated(v)
        if a.positions is None:
            q, k = rotated(q, self.angles), rotated(k, self.angles)
        q, k, v = [t.transpose(0, 1).contiguous() for t in (q, k, v)]
        out = FlashKernel.apply(q, k, v)
        out = out.view(b, s, -1).transpose(0, 1).contiguous()
        return self.linear_proj(out)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.heads // self.kv_heads
        if groups == 1:
            return x
        s, b, n, d = x.shape
        return x[:, :, :, None, :].expand(s, b, n, groups, d).reshape(s, b, n * groups, d)

    def mlp(self, x: torch.Tensor) -> Any:
        wide, bias = self.linear_fc1(x)
        if self.a.gated:
            gate, up = torch.chunk(wide, 2, dim=-1)
            wide = torch.nn.functional.silu(gate) * up
        else:
            wide = BiasGeLU.apply(wide, bias)
        return self.linear_fc2(wide)


class Embedding(nn.Module):
    def __init__(self, a: Architecture, tp: int, vocab: int) -> None:
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        super().__init__()
        config = _config(a, tp)
        self.word_embeddings = VocabParallelEmbedding(vocab, a.hidden, init_method=nn.init.normal_, config=config)
        self.position_embeddings = None if a.positions is None else nn.Embedding(a.positions, a.hidden)

    @property
    def word_embeddings_weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, given: Any) -> torch.Tensor:
        ids, position_ids = given[:2]
        words = self.word_embeddings(ids)
        embeddings = words
        if self.position_embeddings is not None:
            embeddings = words + self.position_embeddings(position_ids)
        return embeddings.transpose(0, 1).contiguous()


def logits_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """parallel_lm_logits: a column-parallel product without a module."""
    import megatron.core.parallel_state as state
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as product

    many = state.get_tensor_model_parallel_world_size() > 1
    return product(input=x, weight=weight, bias=None, gradient_accumulation_fusion=False, allreduce_dgrad=many,
                   sequence_parallel=False)  # fmt: skip


def mean_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    import megatron.core.parallel_state as state

    labels, mask = batch
    labels = labels.transpose(0, 1).contiguous()
    losses = CrossEntropy.apply(logits, labels, state.get_tensor_model_parallel_group())
    losses = losses.transpose(0, 1).contiguous()
    mask = mask.view(-1)
    return torch.sum(losses.view(-1) * mask) / mask.sum()


class GPT(nn.Module):
    """The whole model of a tensor-parallel rank."""

    def __init__(self, a: Architecture, tp: int, vocab: int) -> None:
        super().__init__()
        self.a = a
        self.embedding = Embedding(a, tp, vocab)
        self.layers = nn.ModuleList(Layer(a, tp) for _ in range(a.layers))
        self.final_layernorm = Norm(a.hidden, rms=a.rms_norm)
        self.output_layer = None if a.tied else Head(a, tp, vocab)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> Any:
        x = self.embedding((ids, position_ids))
        for layer in self.layers:
            x = layer(x)
        x = self.final_layernorm(x)
        logits = logits_of(x, self.embedding.word_embeddings_weight) if self.a.tied else self.output_layer(x)
        del x
        return _loss_of(logits, labels, mask)


def _loss_of(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mean_loss(logits.float(), (labels, mask))


class Head(nn.Module):
    def __init__(self, a: Architecture, tp: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab // tp, a.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return logits_of(x, self.weight)


def marked(model: nn.Module) -> None:
    """Weights of which a rank has a part say so, as where Megatron initializes them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, Head)):
            module.weight.tensor_model_parallel = True


# --- ranks


@contextlib.contextmanager
def rank_of(count: int, rank: int, tp: int, pp: int) -> Iterator[None]:
    """This process is one of `count` ranks, on a device like CUDA, with Megatron's groups."""
    import megatron.core.parallel_state as state
    from deepspeed.utils import groups

    with (
        deepspeed_oracle.ranks(count, rank),
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        mock.patch(
            "torch.empty", torch.zeros
        ),  # kernels compute nothing: with what is there by chance a step may overflow
        mock.patch("torch.empty_like", torch.zeros_like),
    ):
        state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, create_gloo_process_groups=False
        )
        try:
            yield
        finally:
            state.destroy_model_parallel()
            groups.mpu = None


class ModelParallelUnit:
    """The `mpu` that Megatron-DeepSpeed hands to deepspeed.initialize without its pipeline."""

    def __init__(self) -> None:
        import megatron.core.parallel_state as state

        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = state.get_tensor_model_parallel_rank
        self.get_model_parallel_world_size = state.get_tensor_model_parallel_world_size
        self.get_tensor_model_parallel_world_size = state.get_tensor_model_parallel_world_size
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = state.get_tensor_model_parallel_group
        self.get_data_parallel_rank = state.get_data_parallel_rank
        self.get_data_parallel_world_size = state.get_data_parallel_world_size
        self.get_data_parallel_group = state.get_data_parallel_group


@dataclass
class Ranked:
    """Bytes of a steady step on one rank, and what it sent."""

    resident: int = 0
    phases: dict[str, int] = field(default_factory=dict[str, int])
    calls: Sent = field(default_factory=Counter)
    log: list[tuple[str, int, tuple[int, ...]]] | None = None


def zeroed(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def batch_of(a: Architecture, batch: int, seq: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros((batch, seq), dtype=torch.int64)
    out = {
        "tokens": ids, "position ids": ids.clone(), "labels": ids.clone(), "loss mask": torch.ones((batch, seq)),
        "attention mask": torch.ones((seq, seq), dtype=torch.bool),
    }  # fmt: skip
    if a.positions is None:
        out["rotary angles"] = torch.zeros((seq, 1, 1, a.head_dim))
    return out


@on_record
def tensor_parallel_step(
    a: Architecture, *, tp: int, dp: int, zero: int, vocab: int, rank: int = 0, precision: str = "bf16",
    batch: int = 1, seq: int = 16, micro_batches: int = 1, steps: int = 3, accumulates_in: str | None = None,
    log: bool = False, **options: int,
) -> Ranked:  # fmt: skip
    """`deepspeed.initialize(model, mpu=…)` around one slice; the last of `steps` steps is reported."""
    import deepspeed

    mode = Mode()
    with rank_of(tp * dp, rank, tp, 1):
        config = configuration(zero, precision, micro_batches, 0.0, options)
        config["train_micro_batch_size_per_gpu"] = batch
        if accumulates_in is not None:
            config["data_types"] = {"grad_accum_dtype": accumulates_in}
        model = GPT(a, tp, vocab)
        marked(model)
        zeroed(model)
        given = batch_of(a, batch, seq)
        for layer in model.layers:
            layer.angles = given.get("rotary angles")
        with mode:
            for tensor in [*given.values(), *model.parameters()]:
                mode.register(tensor)
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config, mpu=ModelParallelUnit()
            )
            out = Ranked()
            for turn in range(steps):
                mode.log = [] if log and turn == steps - 1 else None
                out = _step(mode, engine, given, micro_batches)
                if mode.log is not None:
                    out.log = mode.log
        engine.destroy()
    return out


def _step(mode: Mode, engine: Any, given: dict[str, torch.Tensor], micro_batches: int) -> Ranked:
    gc.collect()
    mode.calls = Counter()
    out = Ranked(mode.now)
    peaks = out.phases = {"forward": 0, "backward": 0, "step": 0}
    batch = [given[name] for name in ("tokens", "position ids", "labels", "loss mask")]
    for _ in range(micro_batches):
        mode.begin()
        engine.held_loss = engine(*batch)
        peaks["forward"] = max(peaks["forward"], mode.highest)
        mode.begin()
        engine.backward(engine.held_loss)
        peaks["backward"] = max(peaks["backward"], mode.highest)
        mode.begin()
        engine.step()
        peaks["step"] = mode.highest
    out.calls = mode.calls
    return out


# --- pipelines


def fp32_logits(x: torch.Tensor) -> torch.Tensor:
    return x.float()


def _as_it_is(x: Any) -> Any:
    return x


def _tied_logits(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return logits_of(x, embedding.word_embeddings_weight)


def pipeline(a: Architecture, tp: int, dp: int, pp: int, vocab: int, *, recompute: bool) -> Any:
    """GPTModelPipe: a list of layers, which PipelineModule cuts."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    tied = {"tied_weight_attr": "word_embeddings_weight"}
    words = TiedLayerSpec("embed", Embedding, a, tp, vocab, **tied) if a.tied else LayerSpec(Embedding, a, tp, vocab)
    head: Any = LayerSpec(Head, a, tp, vocab)
    if a.tied:
        head = TiedLayerSpec("embed", Embedding, a, tp, vocab, forward_fn=_tied_logits, **tied)

    class NormOf(Norm):
        def __init__(self) -> None:
            super().__init__(a.hidden, rms=a.rms_norm)

    specs = [
        _as_it_is,
        words,
        *(LayerSpec(Layer, a, tp) for _ in range(a.layers)),
        LayerSpec(NormOf),
        head,
        fp32_logits,
    ]
    return PipelineModule(
        layers=specs, loss_fn=mean_loss, topology=PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp),
        activation_checkpoint_interval=int(recompute), partition_method="type:^layer$", checkpointable_layers=["Layer"],
    )  # fmt: skip


class Neighbours:
    """Nothing arrives over a fake group: the shapes that stages agree upon in their first step are given, and so are the
    numbers that come with a part."""

    def __init__(self, engine: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        from deepspeed.runtime.utils import PartitionedTensor

        self.engine, self.shape, self.dtype = engine, shape, dtype
        self.partitioned = engine.is_pipe_partitioned
        if self.partitioned:
            whole = PartitionedTensor(torch.zeros(shape, dtype=dtype), engine.grid.get_slice_parallel_group())
            self.meta, self.length = whole.to_meta(), whole.data().numel()

    def agree(self, _: int) -> Any:
        make = self.engine._allocate_or_extend_buffers
        if not self.partitioned:
            return make(0, list(self.shape), self.dtype)
        return make(0, list(self.meta.shape), torch.long), make(1, [self.length], self.dtype)

    def receive(self, tensor: torch.Tensor, _: int, **__: Any) -> None:
        if tensor.dtype == torch.long:
            tensor.copy_(self.meta)


PHASE_OF = {
    "LoadMicroBatch": "forward", "ForwardPass": "forward", "RecvActivation": "forward", "SendActivation": "forward",
    "BackwardPass": "backward", "RecvGrad": "backward", "SendGrad": "backward", "ReduceTiedGrads": "backward",
    "ReduceGrads": "backward", "OptimizerStep": "step",
}  # fmt: skip


def watched(mode: Mode, function: Any, phase: str, out: Ranked) -> Any:
    def instruction(engine: Any, **kwargs: Any) -> None:
        gc.collect()
        mode.begin()
        function(engine, **kwargs)
        out.phases[phase] = max(out.phases.get(phase, 0), mode.highest)

    return instruction


class Batches:
    """A data loader that keeps nothing of what it has handed out."""

    def __init__(self, a: Architecture, batch: int, seq: int) -> None:
        self.sizes = a, batch, seq

    def __next__(self) -> Any:
        made = batch_of(*self.sizes)
        tokens = made["tokens"], made["position ids"], made["attention mask"][None, None]
        return tokens, (made["labels"], made["loss mask"])


def caches_on_the_host(engine: Any) -> None:
    """On a GPU `to("cpu")` makes copies that are not on it."""
    with torch.utils._python_dispatch._disable_current_modes():
        for name, value in vars(engine).items():
            if name.endswith("meta_cache") and value is not None:
                setattr(engine, name, value.clone())


@on_record
def pipeline_step(
    a: Architecture, *, tp: int, dp: int, pp: int, stage: int, vocab: int, zero: int = 1, precision: str = "bf16",
    batch: int = 1, seq: int = 16, micro_batches: int = 1, accumulates_in: str | None = "fp32", recompute: bool = False,
    log: bool = False, data_rank: int = 0, **options: int,
) -> Ranked:  # fmt: skip
    """The second step of the first slice of a stage."""
    import deepspeed
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.engine import PipelineEngine

    mode, dtype = Mode(), {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with rank_of(tp * dp * pp, tp * dp * stage + tp * data_rank, tp, pp):
        config = configuration(zero, precision, micro_batches, 0.0, options)
        config["train_micro_batch_size_per_gpu"] = batch
        if accumulates_in is not None:
            config["data_types"] = {"grad_accum_dtype": accumulates_in}
        deepspeed.init_distributed(dist_init_required=False)
        model = pipeline(a, tp, dp, pp, vocab, recompute=recompute)
        zeroed(model)
        given = batch_of(a, batch, seq)
        kept = [given["attention mask"], *([given["rotary angles"]] if a.positions is None else [])]
        for layer in model.modules():
            if isinstance(layer, Layer):
                layer.angles = given.get("rotary angles")

        with mode:
            for tensor in [*kept, *model.parameters()]:
                mode.register(tensor)
            with mock.patch.object(p2p, "recv", lambda *_, **__: None):
                engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            with torch.utils._python_dispatch._disable_current_modes():
                neighbours = Neighbours(engine, (seq, batch, a.hidden), dtype)
            out = Ranked()
            with (
                mock.patch.object(p2p, "recv", neighbours.receive),
                mock.patch.object(PipelineEngine, "_recv_tensor_meta", lambda _, sender: neighbours.agree(sender)),
            ):
                instructions = dict(PipelineEngine._INSTRUCTION_MAP)
                for turn in range(2):
                    gc.collect()
                    mode.calls, mode.log = Counter(), [] if log and turn else None
                    out = Ranked(mode.now)
                    engine._INSTRUCTION_MAP = {
                        kind: watched(mode, function, PHASE_OF[kind.__name__], out)
                        for kind, function in instructions.items()
                    }
                    engine.train_batch(Batches(a, batch, seq))
                    caches_on_the_host(engine)
                    out.calls, out.log = mode.calls, mode.log
    return out
