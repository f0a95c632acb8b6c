# pyright: basic
"""A pipeline rank of an encoder and a decoder: torch's PipelineStage over stages that transformers has not.

A stage of T5 runs transformers' own T5Stack without the blocks of the others; a stage of BART calls its layers as BartEncoder
and BartDecoder do. Stages of the decoder take two tensors and hand two on, the hidden states and the encoder's output. The first
one is given `decoder_input_ids` by its caller. Every stage of T5 has a copy of its stack's table of relative positions; the
table of tokens is in up to three stages. Behind the last backward the gradients of copies are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from memcalc.pipelining.encoded import encoded_spans
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.optimizers import by_mesh, make
from memcalc.validate.pipeline import SCHEDULES, _agreed, _watch, clip_over_stages
from memcalc.validate.reference import Enter, Job, nbytes, of_rank

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


class Cut(NamedTuple):
    """A stage: some layers of a stack."""

    stack: str
    start: int
    layers: int
    first: bool
    """True for the first stage of its stack."""
    last: bool


def cuts_of(setup: Setup, model: Model) -> list[Cut]:
    """Return the stages in their order, the encoder's first."""
    program: Any = model.program
    out: list[Cut] = []
    for (span,) in encoded_spans(program, setup.pp, setup.encoder_stages):
        is_decoder = span.start >= program.encoder_layers
        start = span.start - (program.encoder_layers if is_decoder else 0)
        depth = program.decoder_layers if is_decoder else program.encoder_layers
        stack = "decoder" if is_decoder else "encoder"
        out.append(Cut(stack, start, span.layers, start == 0, start + span.layers == depth))
    return out


class _T5Stage(nn.Module):
    def __init__(self, whole: Any, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        stack = getattr(whole, cut.stack)
        blocks: list[Any] = list(stack.block)
        bias = blocks[0].layer[0].SelfAttention.relative_attention_bias
        own = blocks[cut.start : cut.start + cut.layers]
        stack.block = nn.ModuleList(own)
        if not cut.first:
            stack.embed_tokens = None
            attention = own[0].layer[0].SelfAttention
            attention.has_relative_attention_bias, attention.relative_attention_bias = True, bias
        if not cut.last:
            stack.final_layer_norm = nn.Identity()
        stack.dropout = _DropoutAtTheEnds(stack.dropout, cut)
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
        if self.lm_head is None:
            return out.last_hidden_state, received[-1]
        sequence_output = out.last_hidden_state
        if self.scale is not None:
            sequence_output = sequence_output * self.scale
        return self.lm_head(sequence_output)


class _DropoutAtTheEnds(nn.Module):
    """The dropout of a T5Stack, which is before its first block and behind its last one: not between two stages."""

    def __init__(self, dropout: nn.Module, cut: Cut) -> None:
        super().__init__()
        self.dropout, self.wanted, self.calls = dropout, (cut.first, cut.last), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = self.wanted[self.calls]
        self.calls = 1 - self.calls
        return self.dropout(x) if wanted else x


class _BartStage(nn.Module):
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
        if self.lm_head is None:
            return hidden_states, received[-1]
        return self.lm_head(hidden_states) + self.final_logits_bias

    def encoder(self, given: torch.Tensor) -> torch.Tensor:
        hidden_states = given
        if self.cut.first:
            inputs_embeds = self.stack.embed_tokens(given)
            embed_pos = self.stack.embed_positions(inputs_embeds[:, :, -1])
            hidden_states = self.stack.layernorm_embedding(inputs_embeds + embed_pos)
            hidden_states = nn.functional.dropout(hidden_states, p=self.stack.dropout, training=self.training)
        mask = create_bidirectional_mask(config=self.stack.config, inputs_embeds=hidden_states, attention_mask=None)
        for layer in self.stack.layers:
            hidden_states = layer(hidden_states, mask)
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
            hidden_states = nn.functional.dropout(hidden_states, p=self.stack.dropout, training=self.training)
        for layer in self.stack.layers:
            hidden_states = layer(hidden_states, attention_mask, encoded, encoder_attention_mask=encoder_attention_mask)
        return hidden_states


STAGES: Final[dict[str, Any]] = {"t5": _T5Stage, "bart": _BartStage}


def encoded_job(
    setup: Setup, model: Model, rank: int, build: Callable[[], Any], shard: Callable[[Any], None], mesh: Any
) -> Job:
    """Return the job of a pipeline rank. `build` makes the whole model, `shard` puts a stage under `fully_shard`."""
    cuts, whole = cuts_of(setup, model), build()
    cut, first, last = cuts[rank], rank == 0, rank == setup.pp - 1
    vocab, wide = whole.config.vocab_size, whole.config.d_model
    module: Any = STAGES[model.model_type](whole, cut)
    shared = whole.get_input_embeddings().weight
    tables = [name for name, p in module.named_parameters() if p is shared]
    biases = [name for name, _ in module.named_parameters() if "relative_attention_bias" in name]
    del whole, shared
    shard(module)
    stage = _stage(setup, module, cut, rank, wide, vocab, mesh)
    _watch([stage], lambda phase: entered[0](phase))

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.view(-1, vocab), target.view(-1))

    running = SCHEDULES[setup.schedule](stage, setup.micro_batches, loss_fn=loss_of)
    running._warmup_p2p = _agreed
    parameters = dict(module.named_parameters())
    optimizer = make(setup, by_mesh(parameters.values()))
    shape = (setup.micro_batches * setup.micro_batch_size, setup.seq_len or 1)
    named = {"input_ids": first, "decoder_input_ids": cut.stack == "decoder" and cut.first, "target": last}
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name, there in named.items() if there}
    of_table = [i for i, one in enumerate(cuts) if one.first or (one.stack == "decoder" and one.last)]
    of_stack = [i for i, one in enumerate(cuts) if one.stack == cut.stack]
    copies = [(name, _group(setup, of_table)) for name in tables[:1]]
    copies += [(name, _group(setup, of_stack)) for name in biases if len(of_stack) > 1]
    losses: list[torch.Tensor] = []
    entered: list[Enter] = [lambda phase: None]

    def step(enter: Enter) -> int:
        entered[0] = enter
        given: dict[str, Any] = {name: t for name, t in batch.items() if name != "input_ids"}
        enter("forward")
        running.step(
            *([batch["input_ids"]] if first else []),
            return_outputs=False,
            **given,
            **({"losses": losses} if last else {}),
        )
        gradients = nbytes(p.grad for p in parameters.values())
        enter("step")
        for name, group in copies:
            torch.distributed.all_reduce(of_rank(parameters[name].grad), group=group)
        if setup.clip_grad_norm:
            clip_over_stages(list(parameters.values()), mesh.get_group("pp"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return gradients

    return Job([module], optimizer, batch, step)


def _stage(setup: Setup, module: Any, cut: Cut, rank: int, wide: int, vocab: int, mesh: Any) -> Any:
    """Return torch's stage, told what it receives and hands on."""
    sizes, first, last = (setup.micro_batch_size, setup.seq_len or 1), rank == 0, rank == setup.pp - 1
    dtype = DTYPES[setup.compute_dtype]

    def made(width: int) -> torch.Tensor:
        return torch.empty(*sizes, width, dtype=dtype, device="meta").requires_grad_()

    is_decoder = cut.stack == "decoder"
    tokens = torch.empty(*sizes, dtype=torch.int64, device="meta")
    taken = (tokens,) if first else (made(wide), made(wide)) if is_decoder and not cut.first else (made(wide),)
    handed = (made(vocab),) if last else (made(wide), made(wide)) if is_decoder else (made(wide),)
    how = {"input_args": taken, "output_args": handed, "group": mesh.get_group("pp")}
    return PipelineStage(module, rank, setup.pp, torch.device("cpu"), **how)


def _group(setup: Setup, stages: list[int]) -> Any:
    """Return the group of the first ranks of some stages."""
    return torch.distributed.new_group([stage * (setup.gpus // setup.pp) for stage in stages])
