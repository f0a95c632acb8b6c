# pyright: basic
"""The reference step as transformers and torch run it, on the backend's device.

out = model(input_ids=ids, labels=ids); loss = out.loss; del out
loss.backward(); optimizer.step(); optimizer.zero_grad(set_to_none=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
import transformers
from torch.nn import Module

from memcalc.core.dtypes import fp32
from memcalc.core.selective import per_op
from memcalc.families import support_of
from memcalc.quantized.chosen import quantization_of
from memcalc.tracing.modules import TORCH, TRANSFORMERS, configuration, quiet, to_run
from memcalc.tracing.step import recompute
from memcalc.validate.context_parallel import whole_sequences
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.flash_loss import with_flash_loss
from memcalc.validate.linear_loss import with_chunked_loss
from memcalc.validate.quantized import quantize, quantized_states
from memcalc.validate.tuning import require_input_grads, tune
from memcalc.validate.ulysses import part_of_batch

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


class Job(NamedTuple):
    """A model ready to be trained."""

    modules: Sequence[Module]
    """The model, or a rank's stages of it."""
    optimizer: Any
    batch: dict[str, torch.Tensor]
    step: Callable[[Enter], int]
    """Runs a step. It reports when a phase begins, and returns the bytes of the gradients that the optimizer gets."""

    def parameters(self) -> list[Any]:
        """Return the parameters, with the tensors that hold them beside their codes."""
        return [t for module in self.modules for t in (*module.parameters(), *quantized_states(module))]

    def buffers(self) -> list[Any]:
        return [b for module in self.modules for b in module.buffers()]

    def states(self) -> list[Any]:
        """Return the optimizer's states, fp32 copies of weights included."""
        kept = [getattr(s, "ortho_matrix", s) for state in self.optimizer.state.values() for s in state.values()]
        return [s for s in (*kept, *getattr(self.optimizer, "copies", ())) if isinstance(s, torch.Tensor)]


Enter = Callable[[str], None]
"""Called with "forward", "backward" or "step" when the phase begins."""
Around = Callable[[bool], AbstractContextManager[Any]]
"""Returns the context of a micro-batch's forward and backward, given whether another one of the same step follows."""


def plain_step(
    setup: Setup, model: Any, optimizer: Any, batch: dict[str, torch.Tensor], around: Around
) -> Callable[[Enter], int]:
    """Return the reference step. `model` is the module, or an engine's wrapper of it. The caller holds the last loss
    until there is a new one."""
    losses: list[Any] = [None]
    dtype, device = setup.autocast_dtype, next(iter(batch.values())).device.type

    def step(enter: Enter) -> int:
        for micro_batch in range(setup.micro_batches):
            with around(micro_batch < setup.micro_batches - 1):
                enter("forward")
                with torch.autocast(device, None if dtype is None else DTYPES[dtype], enabled=dtype is not None):
                    out = model(**batch)
                losses[0] = out.loss
                del out
                enter("backward")
                losses[0].backward()
        gradients = nbytes(p.grad for p in model.parameters())
        enter("step")
        if setup.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return gradients

    return step


def build(setup: Setup, of: Model, fields: dict[str, Any]) -> Module:
    """Return the model with the setup's precision, attention, recomputation and frozen weights. Its device must be the
    default one."""
    cast = setup.engine in ("fsdp2", "deepspeed")  # cast by the engine
    weights = fp32 if cast and setup.has_master_weights else setup.compute_dtype
    quantization = quantization_of(setup)
    if quantization is not None and not cast:
        weights = quantization.original
    with quiet():
        config, named = configuration(of.model_type, fields), of.support.auto_class
        auto = None if named is None else getattr(transformers, named)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # as T5 was trained; its value changes no size
        model = to_run(config, setup.attention or "eager", weights, auto)
        if setup.recompute != "none":
            recompute(model, per_op if setup.recompute == "op" else None)
        if setup.recompute_layers is not None:
            _recompute_first(model, setup.recompute_layers)
        if quantization is not None:
            model = quantize(model, setup)
        model = tune(model, setup, of.program)
        if setup.cross_entropy == "chunked" and setup.task == "pretrain":  # a task has TRL's own head
            with_chunked_loss(model)
        elif setup.cross_entropy == "flash":
            with_flash_loss(model)
        require_input_grads(model, setup)
    return model


def _recompute_first(model: Module, layers: int) -> None:
    """Recompute only the first layers of the stack, by their own switch."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for stack in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]:
        if stack and isinstance(stack[0], GradientCheckpointingLayer):
            for module in (m for layer in list(stack)[layers:] for m in layer.modules()):
                if isinstance(module, GradientCheckpointingLayer):
                    module.gradient_checkpointing = False


def make_batch(setup: Setup, config: Any) -> dict[str, torch.Tensor]:
    """Return a batch of zeros: tokens that are their own labels, speech with its transcript, or images with their
    labels. If ranks share sequences, it is the batch that the engine is given."""
    size, dtype = setup.micro_batch_size, DTYPES[setup.compute_dtype]
    assert setup.seq_len is not None
    kind = support_of(config.model_type).batch
    if kind == "images":
        pixels = torch.zeros((size, config.num_channels, 224, 224), dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.int64)}
    if setup.shares_sequences:
        return whole_sequences((size, setup.seq_len))
    if setup.cp > 1:
        return part_of_batch(size, setup.seq_len, setup.cp, torch.distributed.get_rank() % setup.cp)
    ids = torch.zeros((size, setup.seq_len), dtype=torch.int64)
    if kind == "speech":
        features = torch.zeros((size, config.num_mel_bins, 2 * config.max_source_positions), dtype=dtype)
        batch = {"input_features": features, "labels": ids}
    else:
        batch = {"input_ids": ids, "labels": ids}
    if setup.padded:  # a collator's mask of a batch whose first sequence is a token short
        mask = torch.ones((size, batch.get("input_features", ids).shape[-1]), dtype=torch.int64)
        mask[0, -1] = 0
        batch["attention_mask"] = mask
    return batch


def environment() -> dict[str, str]:
    """Return the versions that run."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "source": f"{TRANSFORMERS}, {TORCH}"}


def of_rank(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, each once; for a sharded tensor those of this rank's part."""
    local: list[Any] = [of_rank(t) for t in tensors if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


class _Packed:
    """A saved tensor as a hook has packed it. It is gone when its node of the graph is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output that is saved would keep its own graph


def saved_by_hooks(setup: Setup, job: Job) -> int:
    """Return the bytes that a forward saves for backward, as autograd's hooks see them: each storage once, without
    weights, buffers and inputs. What a forward has saved and dropped again, as DoRA does, does not count. Then run
    backward, without a step."""
    known = {t.untyped_storage()._cdata for t in (*job.parameters(), *job.buffers(), *job.batch.values())}
    device = next(iter(job.batch.values())).device
    packed: WeakSet[_Packed] = WeakSet()

    def pack(tensor: torch.Tensor) -> _Packed:
        packed.add(one := _Packed(tensor))
        return one

    (module,) = job.modules
    dtype = setup.autocast_dtype
    autocast = torch.autocast(device.type, None if dtype is None else DTYPES[dtype], enabled=dtype is not None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor), autocast:
        loss = module(**job.batch).loss
    storages = {one.tensor.untyped_storage() for one in packed if one.tensor.device == device}
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    loss.backward()
    job.optimizer.zero_grad(set_to_none=True)
    return sum(nbytes for storage, nbytes in sizes.items() if storage not in known)
