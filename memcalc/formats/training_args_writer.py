"""A setup as training arguments: TrainingArguments of transformers, with the keys of TRL's dataclasses if it has a task or
adapters.

Source: transformers/training_args.py (5.23), trl/trainer/sft_config.py, dpo_config.py, kto_config.py, trl/scripts (1.16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_part import Part, joined
from memcalc.formats.training_args_engine_writer import check_engine, engine_part, has_own_recomputation
from memcalc.formats.training_args_kernels_writer import kernels_part
from memcalc.formats.training_args_model_writer import has_model_config, model_part
from memcalc.formats.training_args_optimizer_writer import clipping_part, optimizer_part
from memcalc.formats.unsaid import unsaid
from memcalc.formats.written import Written
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.tasks import OF_TRL, ONLINE, PREFERENCE

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_MIXES: Final = {"none": "autocast", "ddp": "autocast", "fsdp2": "mixed", "deepspeed": "mixed"}
"""The meaning of the Trainer's switches bf16 and fp16 with each engine: the second word of `--precision`."""
_OF_TASK: Final[Mapping[str, Mapping[str, Any]]] = {
    "pretrain": {}, "sft": {}, "dpo": {}, "kto": {"desirable_weight": 1.0},
}  # fmt: skip
"""Keys that only one of TRL's trainers has, with its defaults: they tell the trainer."""
_LAYERS: Final = "the Trainer recomputes whole layers: all, none, or every n-th one"
_WHY: Final[Mapping[str, str]] = {
    "gpus": "the launcher starts the processes (torchrun, accelerate launch, deepspeed)",
    "seq_len": "the data decides it; only TRL's trainers have a max_length",
    "recompute": _LAYERS,
    "recompute_layers": _LAYERS,
    "base_dtype": "the weights have it by --precision alone",
    "input_require_grads": "transformers switches it on with the recomputation of layers, and the script does otherwise",
    "prepare_kbit_training": "the script calls it (peft's prepare_model_for_kbit_training)",
    "freeze": "the script does it (requires_grad_(False))",
}


def write(setup: Setup, model: Model) -> Written:
    """Return the file. Raises InputError for Megatron and for slices of layers and sequences, which TrainingArguments do not
    describe."""
    check_engine(setup)
    engine = engine_part(setup, model)
    part = joined(
        model_part(setup, model),
        _task(setup),
        _batches(setup),
        _precision(setup),
        _recomputation(setup),
        Part({}, frozenset()) if "optimizer" in engine.said else optimizer_part(setup),
        clipping_part(setup),
        _noise(setup),
        kernels_part(setup, model),
        engine,
    )
    return Written(
        f"{_head(setup)}\n{_yaml(part.keys)}", unsaid(setup, model, part.said, part.takes, {**_WHY, **part.why})
    )


def _head(setup: Setup) -> str:
    """Return a comment that says which parser takes the file."""
    if setup.task in OF_TRL:
        return f"# {setup.task.upper()}Config and ModelConfig of TRL: trl {setup.task} --config FILE"
    others = " and ModelConfig of TRL" if has_model_config(setup) else ""
    return f"# TrainingArguments of transformers{others}"


def _yaml(keys: Mapping[str, Any]) -> str:
    import yaml as library

    yaml: Any = library  # its stubs leave out types
    return yaml.safe_dump(dict(keys), sort_keys=False)


def _task(setup: Setup) -> Part:
    """Return the trainer of TRL's, with the length that it cuts sequences to."""
    if setup.task not in OF_TRL:
        return Part({}, frozenset({"task"}))
    if setup.task == "ppo":
        refuse("task", "ppo", f"in a file of TrainingArguments {NOT_YET}pretrain, sft, dpo, kto, grpo")
    if setup.task in ONLINE:
        return _generation(setup)
    keys: dict[str, Any] = {"max_length": setup.seq_len, **_OF_TASK[setup.task]}
    said = {"task", "seq_len", "precompute_reference"}
    if setup.task == "sft":  # told by the first key
        keys["packing"] = setup.packing
        said |= {"packing", "offload_activations"}
        if setup.offload_activations != "none":
            keys["activation_offloading"] = True
    if setup.task in PREFERENCE:  # DPO is told by this key
        keys["precompute_ref_log_probs"] = bool(setup.precompute_reference)
    return Part(keys, frozenset(said))


def _noise(setup: Setup) -> Part:
    keys = {} if setup.neftune_alpha is None else {"neftune_noise_alpha": setup.neftune_alpha}
    return Part(keys, frozenset({"neftune_alpha"}))


def _generation(setup: Setup) -> Part:
    """Return the keys of GRPOConfig. It has none for the length of a prompt. Raises InputError for batches that TRL refuses."""
    together = setup.dp * setup.micro_batch_size * (setup.steps_per_generation or 1)
    if together % (setup.num_generations or 1):
        why = f"TRL refuses the file, because the {together} completions that are generated together are no multiple of it"
        refuse(
            "num_generations", setup.num_generations, f"{why}; allowed: with --micro-batch-size {setup.num_generations}"
        )
    keys: dict[str, Any] = {
        "max_completion_length": setup.completion_len,
        **{name: getattr(setup, name) for name in _OF_GENERATION},
    }
    return Part(keys, frozenset({"task", "precompute_reference", "completion_len", *_OF_GENERATION}))


_OF_GENERATION: Final = ("num_generations", "steps_per_generation", "num_iterations", "beta")


def _batches(setup: Setup) -> Part:
    keys: dict[str, Any] = {"per_device_train_batch_size": setup.micro_batch_size}
    if setup.micro_batches > 1:
        keys["gradient_accumulation_steps"] = setup.micro_batches
    if setup.sync_each_micro_batch:
        keys["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return Part(keys, frozenset({"micro_batch_size", "global_batch_size", "sync_each_micro_batch"}))


def _precision(setup: Setup) -> Part:
    """Return the switch of mixed precision. Weights of 16 bits are a key of ModelConfig, and nobody's otherwise."""
    half, _, mixes = setup.precision.partition("-")
    is_switched = mixes == _MIXES[setup.engine]
    keys = {half: True} if is_switched else {"bf16": False} if setup.task in OF_TRL else {}  # TRL's default is on
    takes: dict[str, Any] = {}
    if setup.engine == "fsdp2" and is_switched:
        takes["grad_dtype"] = half
    why = {"grad_dtype": "accelerate reduces gradients in the dtype that it gathers weights in"}
    if half == "fp32" or is_switched or (not mixes and has_model_config(setup)):
        has_base = mixes == "autocast" and setup.base_dtype not in (None, "fp32")
        of_frozen_shards = setup.engine == "fsdp2" and setup.quantize_storage is not None
        has_base |= is_switched and of_frozen_shards and setup.base_dtype != half
        return Part(keys, frozenset({"precision", "base_dtype"} if has_base else {"precision"}), takes, why)
    why["precision"] = {
        "": "the script loads the weights in that dtype",
        "mixed": "the Trainer keeps no fp32 copies of 16-bit weights: the script does, and loads the weights",
        "autocast": "with FSDP the Trainer gathers 16-bit weights in place of autocast",
    }[mixes]
    return Part(keys, frozenset(), {**takes, "precision": "fp32"}, why)


def _recomputation(setup: Setup) -> Part:
    """Return the switch of recomputation, which FSDP has in its own section."""
    is_full = setup.recompute == "full" and setup.recompute_layers is None
    keys: dict[str, Any] = {}
    if is_full and not has_own_recomputation(setup):
        keys["gradient_checkpointing"] = True
        if setup.reentrant_checkpoints:
            keys["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    elif setup.task in OF_TRL:  # whose default is on
        keys["gradient_checkpointing"] = False
    if is_full or setup.recompute == "none":
        said = {"recompute", "recompute_layers"}
        return Part(keys, frozenset(said if has_own_recomputation(setup) else {*said, "reentrant_checkpoints"}))
    return Part(keys, frozenset(), {"recompute": "none"})
