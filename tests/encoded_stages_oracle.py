"""What one rank of torch.distributed.pipelining really allocates and sends where the stages are those of an encoder and of a
decoder: each under `fully_shard`, PipelineStage and a schedule, autograd and AdamW under fake tensors.

A stage of T5 runs transformers' own T5Stack without the blocks of the others; a stage of BART calls its layers as BartEncoder
and BartDecoder do. Stages of the decoder take two tensors and hand two on, the hidden states and the encoder's output. The first
one is given `decoder_input_ids` by its caller. Every stage of T5 has a copy of its stack's table of relative positions; the
table of tokens is in up to three stages. Behind the last backward the gradients of copies are summed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fsdp2_oracle import POLICIES, resizing
from oracle import build, cuda_kernels, not_traced
from per_op import CHECKPOINTS
from pipeline_oracle import CLASSES, PipelineMode, RankStep, watch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer


class Cut(NamedTuple):
    """A stage: some layers of a stack."""

    stack: str
    start: int
    layers: int
    first: bool
    """The first stage of its stack."""
    last: bool


class T5Stage(nn.Module):
    def __init__(self, whole: Any, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        stack = getattr(whole, cut.stack)
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        stack.block = nn.ModuleList(list(stack.block)[cut.start : cut.start + cut.layers])
        if not cut.first:
            stack.embed_tokens = None
            attention = stack.block[0].layer[0].SelfAttention
            attention.has_relative_attention_bias, attention.relative_attention_bias = True, bias
        if not cut.last:
            stack.final_layer_norm = nn.Identity()
        self.stack = stack
        self.lm_head = whole.lm_head if cut.stack == "decoder" and cut.last else None
        self.scale = whole.model_dim**-0.5 if getattr(whole.config, "scale_decoder_outputs", False) else None

    def forward(self, *received: torch.Tensor, decoder_input_ids: torch.Tensor | None = None) -> Any:
        given: dict[str, Any] = {"use_cache": False}
        if self.cut.stack == "encoder":
            given["input_ids" if self.cut.first else "inputs_embeds"] = received[0]
            return self.stack(**given).last_hidden_state
        if self.cut.first:
            given |= {"input_ids": decoder_input_ids, "encoder_hidden_states": received[0]}
        else:
            given |= {"inputs_embeds": received[0], "encoder_hidden_states": received[1]}
        out = self.stack(**given)
        if not self.cut.last:
            return out.last_hidden_state, received[-1]
        sequence_output = out.last_hidden_state
        if self.scale is not None:
            sequence_output = sequence_output * self.scale
        return self.lm_head(sequence_output)


class BartStage(nn.Module):
    def __init__(self, whole: Any, cut: Cut) -> None:
        super().__init__()
        self.cut, self.config = cut, whole.config
        stack = getattr(whole.model, cut.stack)
        stack.layers = nn.ModuleList(list(stack.layers)[cut.start : cut.start + cut.layers])
        if not cut.first:
            stack.embed_tokens = stack.embed_positions = stack.layernorm_embedding = None
        self.stack = stack
        self.lm_head = None
        if cut.stack == "decoder" and cut.last:
            self.lm_head = whole.lm_head
            self.register_buffer("final_logits_bias", whole.final_logits_bias)

    def forward(self, *received: torch.Tensor, decoder_input_ids: torch.Tensor | None = None) -> Any:
        if self.cut.stack == "encoder":
            return self.encoder(received[0])
        hidden_states = self.decoder(decoder_input_ids if decoder_input_ids is not None else received[0], received[-1])
        if not self.cut.last:
            return hidden_states, received[-1]
        return self.lm_head(hidden_states) + self.final_logits_bias

    def encoder(self, given: torch.Tensor) -> torch.Tensor:
        hidden_states = given
        if self.cut.first:
            inputs_embeds = self.stack.embed_tokens(given)
            embed_pos = self.stack.embed_positions(inputs_embeds[:, :, -1])
            hidden_states = self.stack.layernorm_embedding(inputs_embeds + embed_pos)
        attention_mask = create_bidirectional_mask(
            config=self.stack.config, inputs_embeds=hidden_states, attention_mask=None
        )
        for layer in self.stack.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states

    def decoder(self, given: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        inputs_embeds = self.stack.embed_tokens(given) if self.cut.first else given
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + 0
        attention_mask: Any = torch.ones(inputs_embeds.shape[:2], device=inputs_embeds.device)
        attention_mask = create_causal_mask(
            config=self.stack.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, past_key_values=None
        )
        encoder_attention_mask = create_bidirectional_mask(
            config=self.stack.config, inputs_embeds=inputs_embeds, attention_mask=None, encoder_hidden_states=encoded
        )
        hidden_states = inputs_embeds
        if self.cut.first:
            positions = self.stack.embed_positions(given, 0, position_ids=position_ids)
            hidden_states = self.stack.layernorm_embedding(inputs_embeds + positions)
        for layer in self.stack.layers:
            hidden_states = layer(hidden_states, attention_mask, encoded, encoder_attention_mask=encoder_attention_mask)
        return hidden_states


STAGES: dict[str, Any] = {"t5": T5Stage, "bart": BartStage}


def encoded_step(
    config: dict[str, Any],
    *,
    schedule: str,
    rank: int,
    encoder: Sequence[int],
    decoder: Sequence[int],
    dp: int,
    micro_batches: int,
    micro_batch_size: int,
    seq_len: int,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    policy: torch.dtype | None = torch.bfloat16,
    reshards: bool | None = None,
    recompute: str | None = None,
) -> tuple[RankStep, list[tuple[int, int]]]:
    """A step of pipeline rank `rank`; `encoder`, `decoder`: the layers of each of their stages. With it the bytes of each sum of
    the gradients of copies, and the ranks that it is over."""
    cuts = [
        Cut(stack, sum(counts[:i]), n, i == 0, i == len(counts) - 1)
        for stack, counts in (("encoder", encoder), ("decoder", decoder))
        for i, n in enumerate(counts)
    ]
    cut, total = cuts[rank], len(cuts)
    mode = PipelineMode()
    dist.init_process_group("fake", rank=rank * dp, world_size=total * dp, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            mesh = init_device_mesh("cpu", (total, dp), mesh_dim_names=("pp", "dp"))
            mode.leave_out(mesh._rank_map)
            for context in (FakeTensorMode(allow_non_fake_inputs=True), not_traced(), cuda_kernels(), resizing(mode)):
                stack.enter_context(context)
            whole: Any = build(config, attention, dtype)
            if recompute:
                whole.gradient_checkpointing_enable(CHECKPOINTS[recompute])
            vocab, wide = whole.config.vocab_size, whole.config.d_model
            module: Any = STAGES[config["model_type"]](whole, cut)
            tied = [whole.shared.weight if config["model_type"] == "t5" else whole.model.shared.weight]
            del whole
            tables = [name for name, p in module.named_parameters() if any(p is one for one in tied)]
            biases = [name for name, _ in module.named_parameters() if "relative_attention_bias" in name]
            del tied
            how: dict[str, Any] = {"mesh": mesh["dp"], "mp_policy": POLICIES[policy], "reshard_after_forward": reshards}
            for layer in [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]:
                fully_shard(layer, **how)
            fully_shard(module, **how)
            sizes, between = (micro_batch_size, seq_len), policy or dtype
            ids = torch.empty(*sizes, dtype=torch.int64, device="meta")
            first, last = rank == 0, rank == total - 1

            def hidden() -> torch.Tensor:
                return torch.empty(*sizes, wide, dtype=between, device="meta").requires_grad_()

            is_decoder = cut.stack == "decoder"
            taken = (ids,) if first else (hidden(), hidden()) if is_decoder and not cut.first else (hidden(),)
            logits = torch.empty(*sizes, vocab, dtype=between, device="meta").requires_grad_()
            handed = (logits,) if last else (hidden(), hidden()) if is_decoder else (hidden(),)
            stage = PipelineStage(
                module,
                rank,
                total,
                torch.device("cpu"),
                input_args=taken,
                output_args=handed,
                group=mesh.get_group("pp"),
            )

            def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(output.view(-1, vocab), target.view(-1))

            running = CLASSES[schedule](stage, micro_batches, loss_fn=loss_of)

            def warmed_up(*_: Any) -> None:
                stage._inference_mode = InferenceMode.STATIC

            running._warmup_p2p = warmed_up
            parameters = list(module.parameters())
            optimizer = torch.optim.AdamW(parameters, fused=True)
            whole_batch = (micro_batches * micro_batch_size, seq_len)
            given: dict[str, torch.Tensor] = {}
            if first:
                given["input_ids"] = torch.zeros(whole_batch, dtype=torch.int64)
            if is_decoder and cut.first:
                given["decoder_input_ids"] = torch.zeros(whole_batch, dtype=torch.int64)
            if last:
                given["target"] = torch.zeros(whole_batch, dtype=torch.int64)
            for tensor in [*module.buffers(), *(p._local_tensor for p in parameters), *given.values()]:
                mode.register(tensor)
            with_table = 2 if len(decoder) == 1 else 3
            copies = [(name, with_table) for name in tables[:1]]
            copies += [(name, len(decoder if is_decoder else encoder)) for name in biases]
            by_name = dict(module.named_parameters())
            with mode:
                losses: list[torch.Tensor] = []
                watch(mode, [stage])
                for _ in range(2):
                    gc.collect()
                    mode.sent, mode.moved, mode.split, mode.ring = [], [], [], []
                    mode.flops.clear()
                    mode.peaks = {"forward": 0, "backward": 0, "reduce": 0}
                    resident = mode.now
                    mode.phase = "forward"
                    args = (given["input_ids"],) if first else ()
                    named: dict[str, Any] = {name: t for name, t in given.items() if name == "decoder_input_ids"}
                    if last:
                        named |= {"target": given["target"], "losses": losses}
                    mode.begin()
                    running.step(*args, return_outputs=False, **named)
                    mode.close()
                    mode.begin()
                    sent, mode.sent, mode.phase = mode.sent, [], "step"
                    summed: list[tuple[int, int]] = []
                    for name, ranks in copies:
                        if ranks > 1:
                            gradient = by_name[name].grad._local_tensor
                            dist.all_reduce(gradient, group=mesh.get_group("pp"))
                            summed.append((gradient.nbytes, ranks))
                            del gradient  # a view of its unit's reduced gradients
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    peaks = mode.peaks
                    out = RankStep(
                        resident, peaks["forward"], peaks["backward"], peaks["reduce"], mode.highest, sent,
                        mode.moved, mode.split, mode.ring, [], None, mode.counted,
                    )  # fmt: skip
    finally:
        dist.destroy_process_group()
    return out, summed
