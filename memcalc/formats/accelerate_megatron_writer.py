"""Megatron-LM in an accelerate configuration that is written. It has few of Megatron's arguments, and the plugin takes its
own defaults for others: a setup that needs more is refused.

Source: MegatronLMPlugin of accelerate/utils/dataclasses.py, prepare_multi_gpu_env of utils/launch.py of 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.families.base.architecture import architecture_of
from memcalc.formats.accelerate_part import Part, joined, mixed
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_ELSE: Final = "or emit megatron"
_MODEL: Final = "gpt2"
"""The type whose layers accelerate builds: it hands on layers, hidden size and heads, and the rest is as in GPT-2."""
_FIXED: Final[Mapping[str, tuple[Any, str]]] = {
    "schedule": ("1f1b", "accelerate's launcher hands on no virtual stages"),
    "virtual_stages": (1, "accelerate's launcher hands on no virtual stages"),
    "first_stage_layers": (None, "accelerate hands on the layers of the last stage alone"),
    "cross_entropy": ("vocab-parallel", "accelerate hands on no other loss"),
    "gradient_accumulation_fusion": (True, "accelerate does not hand on the switch"),
    "attention_mask_in_dataloader": (True, "accelerate does not hand on the switch"),
    "offload_optimizer": ("none", "offload with Megatron is not modelled"),
}
"""The options that its keys do not have -> what it takes, and why."""
_SAID: Final = frozenset({
    "engine", "precision", "grad_dtype", "tp", "pp", "cp", "cp_comm_type", "ep", "etp", "zero", "shard_group",
    "sequence_parallel", "last_stage_layers", "global_batch_size", "clip_grad_norm", "recompute", "recompute_layers",
    *_FIXED,
})  # fmt: skip


def megatron_part(setup: Setup, model: Model) -> Part:
    """Return the keys. Raises InputError for what accelerate does not hand on to Megatron."""
    _check(setup, model)
    keys: dict[str, Any] = {
        "tp_degree": setup.tp,
        "pp_degree": setup.pp,
        "context_parallel_size": setup.cp,  # 2 without the key
        "num_micro_batches": setup.micro_batches,
        "use_distributed_optimizer": setup.zero == 1,
        "sequence_parallelism": setup.sequence_parallel,
        "gradient_clipping": 1.0 if setup.clip_grad_norm else 0.0,
        "recompute_granularity": setup.recompute,
        "use_rotary_position_embeddings": False,  # on without the key
    }
    if setup.etp != setup.tp:
        keys["expert_tensor_parallel_size"] = setup.etp
    a = architecture_of(model.model_type, model.program.config)
    keys |= {name: rate for name in ("hidden_dropout", "attention_dropout") if (rate := getattr(a, name))}
    if setup.recompute_layers is not None:
        keys |= {"recompute_method": "block", "recompute_num_layers": setup.recompute_layers}
    if setup.last_stage_layers is not None:
        keys["decoder_last_pipeline_num_layers"] = setup.last_stage_layers
    section = {f"megatron_lm_{name}": value for name, value in keys.items()}
    top = {"distributed_type": "MEGATRON_LM", "megatron_lm_config": section}
    why = {"attention": "Transformer Engine chooses it by the GPU"}
    return joined(Part(top, _SAID, why=why), mixed(setup, "mixed"))


def _check(setup: Setup, model: Model) -> None:
    name = model.name or model.model_type
    if model.model_type != _MODEL:
        why = f"with engine megatron accelerate builds GPT-2's layers, and passes on no others, as {name} has"
        refuse("engine", "megatron", f"{why}; allowed: another engine, {_ELSE}")
    a = architecture_of(model.model_type, model.program.config)
    if a.ffn != 4 * a.hidden:
        why = f"accelerate hands on no width of the MLP, which is {a.ffn} in {name} and not 4 times {a.hidden}"
        refuse("engine", "megatron", f"{why}; allowed: another engine, {_ELSE}")
    if not a.tied:
        why = f"accelerate's GPT-2 ties its head to the embedding, and {name} does not"
        refuse("engine", "megatron", f"{why}; allowed: another engine, {_ELSE}")
    if setup.recompute == "none":
        why = "accelerate's Megatron-LM recomputes always (recompute_granularity)"
        refuse("recompute", "none", f"{why}; allowed: full, selective, {_ELSE}")
    for option, (taken, why) in _FIXED.items():
        value = getattr(setup, option)
        if value != taken:
            refuse(option, value, f"{why}; allowed: {'leave it out' if taken is None else taken}, {_ELSE}")
    if setup.zero and setup.shard_group != setup.dp * setup.cp:
        why = "accelerate does not hand on instances of the distributed optimizer"
        refuse("shard_group", setup.shard_group, f"{why}; allowed: leave it out, {_ELSE}")
    if setup.cp > 1 and setup.cp_comm_type != "p2p":
        refuse("cp_comm_type", setup.cp_comm_type, f"accelerate does not hand it on; allowed: p2p, {_ELSE}")
    if setup.attention == "eager" or (setup.attention == "unfused" and setup.precision != "fp32"):
        why = "Megatron chooses the attention, as accelerate hands on no choice of it"
        refuse("attention", setup.attention, f"{why}; allowed: leave it out, {_ELSE}")
    main = "fp32" if setup.precision in ("fp32", "bf16-mixed") else "fp16"
    if setup.grad_dtype != main:
        why = "accelerate does not hand on the dtype of main gradients"
        refuse("grad_dtype", setup.grad_dtype, f"{why}; allowed: {main}, {_ELSE}")
