# pyright: basic
"""The step of fine-tuning and preference tuning as TRL's trainers run it: their own loss and LM head, over modules made here.

A trainer is made without its `__init__`, which wants tokenizers and data; it gets the attributes that its loss reads.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from memcalc.errors import InputError, one_line
from memcalc.tasks import OF_TRL, TRL

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.live import Live
    from memcalc.validate.reference import Around, Enter, Job

INSTALL = "pip install 'memcalc-llm[preference]'"


def is_of_trl(setup: Setup) -> bool:
    return setup.task in OF_TRL


def batch_of(setup: Setup) -> dict[str, torch.Tensor]:
    """Return a collator's batch of zeros in which every position is a completion's but the first. KTO's sequences are all
    desirable."""
    assert setup.seq_len is not None
    if setup.task == "sft":
        return _batch_of_sft(setup)
    of_each = 2 if setup.task == "dpo" else 1
    sequences = of_each * setup.micro_batch_size
    batch = {name: torch.ones((sequences, setup.seq_len), dtype=torch.int64) for name in _MASKS}
    batch["completion_mask"][:, 0] = 0
    if setup.padded:
        batch["attention_mask"][0, -1] = 0
    batch = {"input_ids": torch.zeros((sequences, setup.seq_len), dtype=torch.int64), **batch}
    given = ("ref_chosen_logps", "ref_rejected_logps")
    if setup.task == "kto":
        batch |= {f"KL_{name}": tensor.clone() for name, tensor in batch.items()}
        batch["label"] = torch.ones(sequences, dtype=torch.bool)
        given = ("ref_logps", "ref_KL_logps")
    if setup.precompute_reference:
        batch |= {name: torch.zeros(setup.micro_batch_size) for name in given}
    return batch


_MASKS = ("attention_mask", "completion_mask")


def _batch_of_sft(setup: Setup) -> dict[str, torch.Tensor]:
    assert setup.seq_len is not None
    shape = (setup.micro_batch_size, setup.seq_len)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
    batch["attention_mask"] = torch.ones(shape, dtype=torch.int64)
    if setup.padded:
        batch["attention_mask"][0, -1] = 0
    return {**batch, _LABELS: torch.tensor(shape[0] * (shape[1] - 1))}


_LABELS: Final = "num_items_in_batch"


def _loss(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Return what a trainer computes from a batch."""
    if _LABELS not in batch:
        return trainer._compute_loss(model, batch, False)
    inputs = {name: tensor for name, tensor in batch.items() if name != _LABELS}
    return trainer.compute_loss(model, inputs, num_items_in_batch=batch[_LABELS])


def preference_job(
    setup: Setup, made: Callable[[Setup], Any], device: str, live: Live | None, stack: contextlib.ExitStack
) -> Job:
    """Return a job of TRL's trainer. `made` builds a model of a setup; `live` is told of DDP's buckets, and of what DeepSpeed
    makes. DeepSpeed's engines last as long as `stack`."""
    from memcalc.validate.engines import replicated
    from memcalc.validate.optimizers import make_optimizer
    from memcalc.validate.reference import Job

    policy = made(setup)
    with_head(setup, policy, metrics=True)
    reference = None
    if setup.has_reference:
        reference = made(
            setup._replace(recompute="none", recompute_layers=None, freeze=None, input_require_grads=False)
        )
        with_head(setup, reference, metrics=False)
    with torch.device(device):
        batch = batch_of(setup)
    modules = [policy] if reference is None else [policy, reference]
    if setup.engine == "deepspeed":
        return _deepspeed_job(setup, modules, batch, live, stack)
    optimizer = make_optimizer(setup, policy)
    model, around = policy, _alone
    if setup.engine == "ddp":
        model, around = replicated(setup, policy, live)
    step = preference_step(setup, _Models(policy, model, reference), optimizer, batch, around)
    return Job(modules, optimizer, batch, step)


def _deepspeed_job(
    setup: Setup, modules: list[Any], batch: dict[str, torch.Tensor], live: Live | None, stack: contextlib.ExitStack
) -> Job:
    """Return the job with an engine around the policy, and one around the reference, if there is one."""
    from memcalc.validate import deepspeed
    from memcalc.validate.reference import Job

    if live is not None:
        for tensor in [*batch.values(), *(t for m in modules for t in (*m.parameters(), *m.buffers()))]:
            live.register(tensor)
    with live or contextlib.nullcontext():
        deepspeed.load()
        engine = deepspeed.engine_of(setup, modules[0], stack)
        others = [deepspeed.inference_engine(setup, module, stack) for module in modules[1:]]
        trainer = _trainer(setup, modules[0], others[0] if others else None)
        step = deepspeed.stepping(setup, engine, modules[0], lambda: _loss(trainer, engine, batch))
        return Job(modules, engine.optimizer, batch, step)


class _Models(NamedTuple):
    """The models of a trainer."""

    policy: Any
    """The policy, or peft's model of it."""
    wrapped: Any
    """An engine's wrapper of the policy, or the policy itself."""
    reference: Any
    """None if it is the policy's base, or was needed before training only."""


def _alone(follows: bool) -> Any:
    return contextlib.nullcontext()


def preference_step(
    setup: Setup, models: _Models, optimizer: Any, batch: dict[str, torch.Tensor], around: Around
) -> Callable[[Enter], int]:
    """Return a step of TRL's trainer. The caller holds the last loss until there is a new one."""
    from memcalc.validate.reference import nbytes

    losses: list[Any] = [None]
    trainer, parameters = _trainer(setup, models.policy, models.reference), list(models.policy.parameters())

    def step(enter: Enter) -> int:
        for micro_batch in range(setup.micro_batches):
            with around(micro_batch < setup.micro_batches - 1):
                enter("forward")
                losses[0] = _loss(trainer, models.wrapped, batch)
                enter("backward")
                losses[0].backward()
        gradients = nbytes(p.grad for p in parameters)
        enter("step")
        if setup.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return gradients

    return step


def with_head(setup: Setup, model: Any, *, metrics: bool) -> None:
    """Give a model TRL's head, and a context of autocast around its forward, as accelerate's prepare_model does."""
    from memcalc.validate.reference import DTYPES

    utils = _trl("trl.trainer.utils")
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    asked = ("log_probs", "entropy", *(() if setup.task == "sft" else ("mean_logits",)), "is_top1")
    more = {"outputs": asked} if metrics else {}
    if setup.task != "sft":
        utils.disable_dropout_in_model(model)
    utils.add_fused_lm_head(base, **more)
    dtype = setup.autocast_dtype
    if dtype is not None:
        device = next(model.parameters()).device.type
        model.forward = torch.autocast(device, DTYPES[dtype])(model.forward)


def _trainer(setup: Setup, model: Any, reference: Any) -> Any:
    module = _trl(f"trl.trainer.{setup.task}_trainer")
    trainer = object.__new__(getattr(module, f"{setup.task.upper()}Trainer"))
    device = next(model.parameters()).device
    alone = SimpleNamespace(
        device=device,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        unwrap_model=lambda x: x,
        parallelism_config=None,
        num_processes=setup.dp,
    )
    own: dict[str, Any] = {
        "model": model, "ref_model": reference, "accelerator": alone, "_metrics": defaultdict(lambda: defaultdict(list)),
        "args": SimpleNamespace(
            gradient_checkpointing_kwargs={"use_reentrant": False}, loss_type="nll", average_tokens_across_devices=True
        ),
        "beta": 0.1, "compute_loss_func": None, "label_smoother": None, "get_tp_size": lambda: 1,
        "precompute_ref_logps": bool(setup.precompute_reference), "aux_loss_enabled": False, "_tp_size": 1,
        "_total_train_tokens": 0, "ld_alpha": None, "f_divergence_type": "reverse_kl", "loss_types": ["sigmoid"],
        "loss_weights": [1.0], "use_weighting": False, "label_smoothing": 0.0, "loss_type": "kto", "calculate_KL": True,
        "desirable_weight": 1.0, "undesirable_weight": 1.0,
    }  # fmt: skip
    vars(trainer).update(own)
    return trainer


def _trl(name: str) -> Any:
    """Import a module of TRL. Raises InputError without it, or with another version."""
    import importlib

    try:
        version = importlib.import_module("trl").__version__
        module = importlib.import_module(name)
    except Exception as error:  # the import looks for other packages, which can fail in any way
        raise InputError(f"--task: needs {INSTALL} to be run ({one_line(error)})") from None
    if not version.startswith(TRL.removeprefix("TRL ") + "."):
        raise InputError(f"--task: is run with {TRL}, not {version}; {INSTALL}")
    return module


@contextlib.contextmanager
def triton_of_a_gpu() -> Iterator[None]:
    """Let TRL's head take its Triton kernels within a block, which work in place: here they do nothing, as the in-place
    product with fp32 sums does nothing that is seen. `logsigmoid` has no buffer on CUDA."""
    kernel, utils = _trl("trl.kernels.chunked_logprob"), _trl("trl.trainer.utils")
    launched = _Launched()
    replaced: list[tuple[Any, str, Any]] = [
        (kernel, "_use_triton", lambda device: True), (utils, "_use_triton", lambda device: True),
        (kernel, "_forward_kernel", launched), (kernel, "_backward_kernel", launched),
        (kernel, "_addmm_fp32", lambda total, a, b: None),
        (kernel, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b))),
        (torch.nn.functional, "logsigmoid", _LogSigmoid.apply),
    ]  # fmt: skip
    own = [(place, name, getattr(place, name, None)) for place, name, _ in replaced]
    for place, name, value in replaced:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in own:
            setattr(place, name, value)


class _LogSigmoid(torch.autograd.Function):
    """`logsigmoid` with CUDA's results: the buffer, which the CPU's backward needs, has no elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return torch.empty_like(x)


class _Launched:
    """A kernel's launcher."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None
