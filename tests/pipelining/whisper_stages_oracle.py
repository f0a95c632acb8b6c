"""What one rank of torch.distributed.pipelining really allocates and sends where the stages are those of Whisper: as
encoded_stages_oracle does it for T5 and BART.

A stage calls transformers' own convolutions, embeddings and layers as WhisperEncoder and WhisperDecoder do. The encoder's hidden
states have a place for each two frames of a spectrogram, the decoder's one for each token.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from encoded_stages_oracle import Cut
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
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer


class WhisperStage(nn.Module):
    def __init__(self, whole: Any, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        stack = getattr(whole.model, cut.stack)
        stack.layers = nn.ModuleList(list(stack.layers)[cut.start : cut.start + cut.layers])
        if not cut.first:
            for name in ("conv1", "conv2") if cut.stack == "encoder" else ("embed_tokens",):
                setattr(stack, name, None)
            stack.embed_positions = None
        if not cut.last:
            stack.layer_norm = None
        self.stack = stack
        self.proj_out = whole.proj_out if cut.stack == "decoder" and cut.last else None

    def forward(self, *received: torch.Tensor, decoder_input_ids: torch.Tensor | None = None) -> Any:
        if self.cut.stack == "encoder":
            return self.encoder(received[0])
        hidden_states = self.decoder(decoder_input_ids if decoder_input_ids is not None else received[0], received[-1])
        return (hidden_states, received[-1]) if self.proj_out is None else self.proj_out(hidden_states)

    def encoder(self, given: torch.Tensor) -> torch.Tensor:
        stack, hidden_states = self.stack, given
        if self.cut.first:
            inputs_embeds = nn.functional.gelu(stack.conv1(given))
            inputs_embeds = nn.functional.gelu(stack.conv2(inputs_embeds))
            inputs_embeds = inputs_embeds.permute(0, 2, 1)
            all_positions = torch.arange(stack.embed_positions.num_embeddings, device=inputs_embeds.device)
            hidden_states = inputs_embeds + stack.embed_positions(all_positions)
        for layer in stack.layers:
            hidden_states = layer(hidden_states, None)
        return stack.layer_norm(hidden_states) if self.cut.last else hidden_states

    def decoder(self, given: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        stack, hidden_states = self.stack, given
        if self.cut.first:
            inputs_embeds = stack.embed_tokens(given)
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + 0
            position_ids = position_ids.unsqueeze(0).repeat(inputs_embeds.shape[0], 1)
            positions = stack.embed_positions(given, past_key_values_length=0, position_ids=position_ids)
            hidden_states = inputs_embeds + positions
        causal_mask = create_causal_mask(
            config=stack.config, inputs_embeds=hidden_states, attention_mask=None, past_key_values=None
        )
        for layer in stack.layers:
            hidden_states = layer(hidden_states, causal_mask, encoded, encoder_attention_mask=None)
        return stack.layer_norm(hidden_states) if self.cut.last else hidden_states


def whisper_step(
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
    """A step of pipeline rank `rank`, and the bytes of each sum of the gradients of copies with the ranks that it is over. The
    spectrograms are in the dtype that the model computes in."""
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
            ties = whole.config.tie_word_embeddings
            vocab, wide = whole.config.vocab_size, whole.config.d_model
            places, mel = whole.config.max_source_positions, whole.config.num_mel_bins
            table = whole.model.decoder.embed_tokens.weight
            module: Any = WhisperStage(whole, cut)
            del whole
            tables = [name for name, p in module.named_parameters() if p is table]
            del table
            how: dict[str, Any] = {"mesh": mesh["dp"], "mp_policy": POLICIES[policy], "reshard_after_forward": reshards}
            for layer in [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]:
                fully_shard(layer, **how)
            fully_shard(module, **how)
            between = policy or dtype
            first, last, is_decoder = rank == 0, rank == total - 1, cut.stack == "decoder"

            def hidden(tokens: int) -> torch.Tensor:
                return torch.empty(micro_batch_size, tokens, wide, dtype=between, device="meta").requires_grad_()

            features = torch.empty(micro_batch_size, mel, 2 * places, dtype=between, device="meta")
            of_decoder = (hidden(places),) if cut.first else (hidden(seq_len), hidden(places))
            taken = (features,) if first else of_decoder if is_decoder else (hidden(places),)
            logits = torch.empty(micro_batch_size, seq_len, vocab, dtype=between, device="meta").requires_grad_()
            handed = (logits,) if last else (hidden(seq_len), hidden(places)) if is_decoder else (hidden(places),)
            group = mesh.get_group("pp")
            stage = PipelineStage(
                module, rank, total, torch.device("cpu"), input_args=taken, output_args=handed, group=group
            )

            def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(output.view(-1, vocab), target.view(-1))

            running = CLASSES[schedule](stage, micro_batches, loss_fn=loss_of)

            def warmed_up(*_: Any) -> None:
                stage._inference_mode = InferenceMode.STATIC

            running._warmup_p2p = warmed_up
            parameters = list(module.parameters())
            optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], fused=True)
            sequences = micro_batches * micro_batch_size
            given: dict[str, torch.Tensor] = {}
            if first:
                given["input_features"] = torch.zeros((sequences, mel, 2 * places), dtype=between)
            if is_decoder and cut.first:
                given["decoder_input_ids"] = torch.zeros((sequences, seq_len), dtype=torch.int64)
            if last:
                given["target"] = torch.zeros((sequences, seq_len), dtype=torch.int64)
            for tensor in [*module.buffers(), *(p._local_tensor for p in parameters), *given.values()]:
                mode.register(tensor)
            copies = [(name, 2) for name in tables[:1]] if len(decoder) > 1 and ties else []
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
                    args = (given["input_features"],) if first else ()
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
                        gradient = by_name[name].grad._local_tensor
                        dist.all_reduce(gradient, group=group)
                        summed.append((gradient.nbytes, ranks))
                        del gradient
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
