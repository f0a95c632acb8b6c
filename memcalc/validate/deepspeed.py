# pyright: basic
"""DeepSpeed's own engine around transformers' model; on the CPU with an accelerator object that answers as CUDA's.

DeepSpeed asks an accelerator for the device's properties. `like_cuda` is its CPU accelerator with CUDA's answers: there
are streams, which do nothing here, so the branches are those of a GPU. FusedAdam is DeepSpeed's own without the CUDA
kernel, which allocates nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from memcalc.engines.deepspeed.zero_optimizer import has_fused_adam
from memcalc.errors import InputError, one_line
from memcalc.validate.host import known_in_backward, like_cuda_beside
from memcalc.validate.optimizers import make
from memcalc.validate.reference import Enter, Job, nbytes
from memcalc.validate.ulysses import shared_loss, shared_sequences
from memcalc.validate.zero3_order import sets_in_order

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.validate.host import Places

_STAGE_3: Final = "stage3_"
_OPTIONS: Final = {
    "reduce_bucket_size": "", "sub_group_size": "", "max_live_parameters": _STAGE_3, "max_reuse_distance": _STAGE_3,
    "param_persistence_threshold": _STAGE_3, "prefetch_bucket_size": _STAGE_3,
}  # fmt: skip
"""A field of the setup -> the prefix of its name in a ds_config."""


def load() -> Any:
    """Return the package. Raises InputError if it cannot be imported."""
    try:
        with _environment({"DS_ACCELERATOR": "cpu"} if not torch.cuda.is_available() else {}):
            import deepspeed
    except Exception as error:  # the import looks for compilers and devices
        why = f"needs pip install 'memcalc-llm[deepspeed]' to be run ({one_line(error)})"
        raise InputError(f"--engine deepspeed: {why}") from None
    return deepspeed


def configuration(setup: Setup) -> dict[str, Any]:
    """Return the ds_config of a setup."""
    own = {prefix + name: getattr(setup, name) for name, prefix in _OPTIONS.items() if getattr(setup, name) is not None}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": setup.zero, **own, **_offload(setup), **_overlap(setup)},
        "steps_per_print": 10**9,
    }
    if has_fused_adam(setup):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "adam_w_mode": setup.optimizer == "adamw"}}
    else:
        config["zero_allow_untested_optimizer"] = True
    if setup.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": setup.ep}
    if setup.precision == "bf16-mixed":
        config["bf16"] = {"enabled": True}
    if setup.precision == "fp16-mixed":  # a loss scale of 2 overflows nothing, so no step is skipped
        config["fp16"] = {"enabled": True, "initial_scale_power": 1}
    return config


def _overlap(setup: Setup) -> dict[str, Any]:
    """Return the switch of a second bucket where it is on."""
    return {"overlap_comm": True} if setup.overlap_comm else {}


def _offload(setup: Setup) -> dict[str, Any]:
    """Return what of a ds_config says where states and weights are kept."""
    places = {"offload_optimizer": setup.offload_optimizer, "offload_param": setup.offload_params}
    return {name: {"device": where} for name, where in places.items() if where != "none"}


def deepspeed_job(setup: Setup, module: Any, batch: dict[str, torch.Tensor], stack: contextlib.ExitStack) -> Job:
    """Return the job. `module` is in fp32: DeepSpeed casts it. The replacement of its attention lasts as long as
    `stack`."""
    load()
    mpu = stack.enter_context(shared_sequences(module, setup.cp, setup.micro_batch_size))
    engine = engine_of(setup, module, stack, mpu)

    def loss() -> Any:
        return engine(**batch).loss if mpu is None else shared_loss(engine, batch, setup.cp)

    return Job([module], engine.optimizer, batch, stepping(setup, engine, module, loss))


def engine_of(setup: Setup, module: Any, stack: contextlib.ExitStack, mpu: Any = None) -> Any:
    """Return the engine around a module that trains, until `stack` ends."""
    own = None if has_fused_adam(setup) else make(setup, [list(_trained(module))])
    engine, *_ = load().initialize(
        model=module,
        optimizer=own,
        model_parameters=_trained(module),  # asked for when the engine has replaced modules
        config=configuration(setup),
        dist_init_required=False,
        mpu=mpu,
    )
    stack.callback(engine.destroy)  # its hooks would keep it
    return engine


def inference_engine(setup: Setup, module: Any, stack: contextlib.ExitStack) -> Any:
    """Return the engine around a module that does not train, as TRL's prepare_deepspeed makes it: without an optimizer, in
    stage 3 or 0."""
    config = {name: value for name, value in configuration(setup).items() if name != "optimizer"}
    if setup.zero != 3:
        config["zero_optimization"] = {**config["zero_optimization"], "stage": 0}
    engine, *_ = load().initialize(model=module, config=config, dist_init_required=False)
    stack.callback(engine.destroy)
    engine.eval()
    return engine


def stepping(setup: Setup, engine: Any, module: Any, loss: Callable[[], Any]) -> Callable[[Enter], int]:
    """Return a step of the engine. `loss` runs a micro-batch's forward. The last loss is held until there is a new one."""
    losses: list[Any] = [None]
    given: Callable[[], int] = (
        _gradients_of_backward(engine, module) if setup.zero == 1 else lambda: _given(engine, module)
    )

    def step(enter: Enter) -> int:
        gradients = 0
        for micro_batch in range(setup.micro_batches):
            enter("forward")
            losses[0] = loss()
            enter("backward")
            engine.backward(losses[0])
            if micro_batch == setup.micro_batches - 1:
                gradients = given()
                enter("step")
            engine.step()
        return gradients

    return step


def _trained(module: Any) -> Iterator[Any]:
    return (p for p in module.parameters() if p.requires_grad)


def _given(engine: Any, module: Any) -> int:
    """Return the bytes of the gradients that the step gets: the weights', in stage 2 those of the rank's partitions.
    These are the first of each list; padding follows. With offload they are on the host."""
    if getattr(engine.optimizer, "cpu_offload", False):
        return 0
    lists = getattr(engine.optimizer, "averaged_gradients", None)
    if lists is None or engine.zero_optimization_stage() == 3:
        return nbytes(p.grad for p in module.parameters())
    parameters = engine.optimizer.params_in_partition
    return sum(part.nbytes for i, own in enumerate(parameters) for part in lists[i][: len(own)])


def _gradients_of_backward(engine: Any, module: Any) -> Callable[[], int]:
    """Return a function that returns the bytes of stage 1's gradients. All exist until they are reduced; then those of
    other ranks are freed."""
    reduce, found = engine.optimizer.reduce_gradients, [0]

    def reduce_gradients(*args: Any, **named: Any) -> None:
        found[0] = nbytes(p.grad for p in module.parameters())
        reduce(*args, **named)

    engine.optimizer.reduce_gradients = reduce_gradients
    return lambda: found[0]


class KeptTensors(NamedTuple):
    """The tensors of DeepSpeed's buffers, by component."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor] | None
    """The gradients of stage 3, whose buffer stays."""
    states: list[torch.Tensor]
    """The optimizer's states, fp32 copies of weights included."""


def kept_tensors(job: Job) -> KeptTensors:
    """Return the tensors alive between two steps (runtime/zero/stage3.py, stage_1_and_2.py,
    runtime/fp16/fused_optimizer.py)."""
    own = job.optimizer
    inner = getattr(own, "optimizer", own)
    partitions = [p.ds_tensor for p in job.parameters() if hasattr(p, "ds_tensor")]
    masters = [t for name in _MASTERS for t in getattr(own, name, ())]
    buffer = getattr(own, "grad_partitions_flat_buffer", None)
    kept = [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return KeptTensors(
        partitions or [p.data for p in job.parameters()], None if buffer is None else [buffer], [*kept, *masters]
    )


_MASTERS: Final = ("fp32_groups_flat", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
"""The names in stage 0, in stages 1 and 2, and in stage 3."""


def ranks_to_run(setup: Setup, model: Model) -> list[int]:
    """Return the ranks to run. One of them is the worst rank, which the estimate is for.

    In stages 1 and 2 partitions differ. The candidates are the first and the last rank, the one with most elements, the
    one with most in the step, the one with most while gradients are reduced after backward (stage 1), and those that
    can have most in backward. In stage 0 all but the first of the ranks that share a sequence mask what the first one
    counts.
    """
    if setup.zero not in (1, 2):
        return [1 if setup.cp > 1 and setup.zero == 0 else 0]
    from memcalc.engines.deepspeed.zero1_reduction import most_while_reducing
    from memcalc.engines.deepspeed.zero_layout import can_have_most, partitions, whole_of
    from memcalc.engines.deepspeed.zero_partitions import nbytes_of, step_of
    from memcalc.engines.parts import expert_parallel_rank

    model, ranks = expert_parallel_rank(model, setup) if setup.ep > 1 else model, setup.shards
    owned = partitions(model, ranks)
    if setup.offloads:
        from memcalc.engines.deepspeed.offloaded_1_2 import have_most

        return sorted({0, ranks - 1, *map(owned.index, have_most(model, setup))})
    most = [max(owned, key=whole_of), max(owned, key=lambda own: nbytes_of(step_of(own, setup)))]
    if setup.zero == 1:
        most.append(most_while_reducing(model, setup)[0])
    in_backward = can_have_most(model, ranks, setup.reduce_bucket_size or 1)
    return sorted({0, ranks - 1, *map(owned.index, (*most, *in_backward))})


# --- on the CPU


class _Stream:
    """A stream, or an event on one. Nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


def like_cuda() -> Any:
    """Return DeepSpeed's CPU accelerator with CUDA's answers."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    base: Any = CPU_Accelerator

    class LikeCuda(base):
        Stream = _Stream
        Event = _Stream

        def is_synchronized_device(self) -> bool:
            return False

        def use_host_timers(self) -> bool:
            return True

        def current_stream(self, device_index: Any = None) -> _Stream:
            return _Stream()

        default_stream = current_stream

        def is_fp16_supported(self) -> bool:
            return True

        def create_op_builder(self, class_name: str) -> Any:
            kernel = SimpleNamespace(multi_tensor_adam=lambda *_: None)
            return SimpleNamespace(load=lambda: kernel) if class_name == "FusedAdamBuilder" else None

    return LikeCuda()


@contextlib.contextmanager
def on_the_cpu(places: Places | None = None) -> Iterator[None]:
    """Let DeepSpeed treat CPU tensors as CUDA's within a block, but those of the host that `places` knows."""
    load()
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.ops.adam import cpu_adam, fused_adam

    own, record_stream, builder = get_accelerator(), torch.Tensor.record_stream, fused_adam.FusedAdamBuilder
    on_host = cpu_adam.CPUAdamBuilder
    accelerator = like_cuda() if places is None else like_cuda_beside(places, type(like_cuda()))
    if places is not None:
        cpu_adam.CPUAdamBuilder = lambda: accelerator.cpu_adam
    set_accelerator(accelerator)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    fused_adam.FusedAdamBuilder = lambda: accelerator.create_op_builder("FusedAdamBuilder")
    try:
        with forgetting(), sets_in_order(), contextlib.nullcontext() if places is None else known_in_backward(places):
            yield
    finally:
        cpu_adam.CPUAdamBuilder = on_host
        fused_adam.FusedAdamBuilder = builder
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]
        set_accelerator(own)


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """Remove what DeepSpeed leaves in torch and in its own modules after a block: process groups, and ZeRO-3's linear
    function."""
    load()
    from deepspeed import comm
    from deepspeed.utils import groups

    linear = torch.nn.functional.linear
    try:
        with _environment({"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}):
            yield
    finally:
        torch.nn.functional.linear = linear
        comm.comm.cdb = None
        for name, value in vars(groups).items():
            if name.startswith("_") and name.endswith("GROUP"):
                setattr(groups, name, {} if isinstance(value, dict) else None)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
