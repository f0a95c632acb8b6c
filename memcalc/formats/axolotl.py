"""axolotl's files.

Source: axolotl at 067b021: src/axolotl/utils/schemas/*.py, utils/config/__init__.py (resolve_dtype, normalize_config),
loaders/model.py, loaders/adapter.py, core/builders/*.py, integrations/{liger,cut_cross_entropy,expert_parallel}/.
"""

from __future__ import annotations

import re
from typing import Final

from memcalc.formats.found import ACCUMULATION, Found
from memcalc.formats.reentry import SWITCH, read_reentry, torch_decides
from memcalc.formats.section import Section
from memcalc.formats.trainer_adapters import (
    BY_NAME,
    Adapters,
    give_eight_bits,
    give_quantized,
    give_storage,
    read_adapters,
)
from memcalc.formats.trainer_additions import note_tf32, read_noise
from memcalc.formats.trainer_args import COMPILED
from memcalc.formats.trainer_findings import (
    Findings,
    deepspeed_file,
    is_on,
    mapping,
    modules,
    name,
    refuse_misspelt,
    texts,
)
from memcalc.formats.trainer_fsdp import read_fsdp
from memcalc.formats.trainer_kernels import FLASH, give_parts, read_attention
from memcalc.formats.trainer_optimizers import read_clipping, read_optimizer
from memcalc.formats.trainer_precision import combined, dtype, give_precision

_ADAPTERS: Final = Adapters(
    "lora_r", "lora_target_modules", "lora_modules_to_save", "peft_use_dora", None, "default", 0.0
)
_RL: Final = ("dpo", "ipo", "kto", "orpo", "simpo", "grpo", "gdpo", "ebft")
_OLD_ATTENTION: Final = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": FLASH, "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
"""Switches of older versions, the first that is on wins."""
_LIGER: Final = {
    "liger_rope": "rope",
    "liger_rms_norm": "rms_norm",
    "liger_glu_activation": "swiglu",
    "liger_swiglu": "swiglu",
}
_DEGREES: Final = {"tensor_parallel_size": "tp", "context_parallel_size": "cp", "expert_parallel_size": "ep"}
_MATTER: Final = (
    "base_model", "micro_batch_size", "gradient_accumulation_steps", "sequence_len", "sample_packing", "optimizer",
    "gradient_checkpointing", "load_in_4bit", "load_in_8bit", "adapter", "lora_target_linear", "lora_target_modules",
    "flash_attention", "sdp_attention", "attn_implementation", "deepspeed", "fsdp_config", "activation_offloading",
    "unfrozen_parameters", "dp_shard_size", *_LIGER, *_DEGREES, "liger_fused_linear_cross_entropy", "lora_modules_to_save",
)  # fmt: skip
_OTHERS: Final = (
    "eval_sequence_len", "eval_sample_packing", "gradient_checkpointing_kwargs", "lora_target_parameters", "adapters",
    "liger_rms_norm_gated", "liger_layer_norm", "eval_batch_size", "base_model_config", "fsdp", "sequence_parallel_degree",
    "sage_attention", "dp_replicate_size", "liger_cross_entropy", "lora_r", "batch_size", "eager_attention", "lora_alpha",
    "unfrozen_layers", "flex_attention",
)  # fmt: skip
_ONE_OR_MORE: Final = re.compile(r"(\[[^\]]*\]|\\.|[\w.])\+")
_REPEATED_GROUP: Final = re.compile(r"\)[*{?]")
_REPEATED: Final = re.compile(r"[*{]")
_MOST_REPEATED: Final = 3
"""A pattern with more repetitions can take hours to not match (`.*.*.*.*.*.*x`)."""
_NOTED: Final = {
    "sample_packing": "rows are counted as single sequences of the whole length",
    "pretraining_sample_concatenation": "rows are counted as single sequences of the whole length",
    "batch_flattening": "rows are counted as single sequences of the whole length",
    "torch_compile": COMPILED,
    "deepcompile": "compiled code is not modelled; each operator is counted",
    "noisy_embedding_alpha": "the noise that NEFTune adds to the embeddings is not counted",
    "selective_checkpointing": "layers are taken to be recomputed as a whole",
    "layer_offloading": "frozen layers are counted as kept on the GPU",
    "tiled_mlp": "the MLP is counted over all tokens at once",
    "auto_find_batch_size": "the batch is taken to fit as it is given",
    "ddp_bucket_cap_mb": "buckets of 25 MiB, torch's default, are counted",
    "torch_empty_cache_steps": "the allocator's cache is taken to be kept",
    "gc_steps": "the allocator's cache is taken to be kept",
    "flash_attn_fuse_mlp": "transformers' own MLP is counted",
    "chunked_cross_entropy": "the model's own loss is counted",
    "use_eaft": "the model's own loss is counted",
    "use_kernels": "transformers' own kernels are counted",
    "experts_implementation": "transformers' own experts are counted",
    "overrides_of_model_config": "the model is counted as its own configuration has it",
    "model_config": "the model is counted as its own configuration has it",
    "lora_model_dir": "the adapter is taken to have the shapes that this file gives",
    "relora": "a step between two restarts is counted",
    "fp32_norms": "norms are counted in the dtype of the other weights",
    "liger_layer_norm": "transformers' own LayerNorm is counted",
    "liger_rms_norm_gated": "transformers' own gated norm is counted",
    "quantize_moe_experts": "experts are counted in 16 bits",
    "qat": "fake quantisation is not counted",
    "resize_token_embeddings_to_32x": "the vocabulary is counted as the model's configuration has it",
    "use_pose": "rows are counted as they are",
}
_OFFLOADS: Final = "offload"
"""The old word for `activation_offloading: true`."""
_INPUTS: Final = "inputs of layers are counted as kept on the GPU"
_REFUSED: Final = {
    "reward_model": "allowed: false (reward models are not modelled)",
    "process_reward_model": "allowed: false (reward models are not modelled)",
    "gptq": "allowed: false (bases of GPTQ are not modelled)",
    "lisa_n_layers": "allowed: nothing (LISA is not modelled)",
    "kd_trainer": "allowed: false (distillation is not modelled)",
    "spectrum_top_fraction": "allowed: nothing (Spectrum picks layers by their weights)",
    "lora_target_parameters": "allowed: nothing; name the experts' layers among the modules (w1, w3 or gate_proj, up_proj)",
    "peft_layers_to_transform": "allowed: nothing (adapters of some layers are not modelled)",
    "peft_layer_replication": "allowed: nothing (repeated layers are not modelled)",
    "lora_rank_pattern": "allowed: nothing (one rank for all modules is modelled)",
    "llama4_linearized_experts": "allowed: false (experts apart are not modelled)",
}


def read_axolotl(section: Section) -> Found:
    """Return what a file of axolotl says. axolotl drops keys that it does not know. Raises InputError."""
    refuse_misspelt(section, _MATTER, {*_MATTER, *_OTHERS})
    found = Findings(section)
    found.refuse_each(_REFUSED)
    model = name(section, "base_model", "a bundled name, a Hub id or a path")
    found.model = None if model is None else section.value("base_model", model)
    _read_batch(found)
    found.take("seq_len", "sequence_len", section.whole("sequence_len", least=1, most=10**8), 512)
    _read_recompute(found)
    rl = _read_task(found)
    uses_deepspeed = deepspeed_file(found)
    engine = "deepspeed" if uses_deepspeed else _read_engine(found)
    adapter = _read_adapter(found, rl)
    _read_precision(found, adapter, engine)
    _read_offloaded(found, trains_all=adapter is None and engine is None and rl is None)
    _read_frozen(found)
    _read_optimizer(found, engine)
    _read_attention(found)
    if adapter is None and engine is None:
        _note_fp32(found)
    _read_kernels(found, rl)
    read_noise(found)
    note_tf32(found)
    found.note_each(_NOTED)
    return found.found()


def _read_batch(found: Findings) -> None:
    """Set the micro-batch and accumulation. `batch_size` would give accumulation, but that has a default of its own, 1, which
    comes first (utils/schemas/training.py, normalize_config of utils/config/__init__.py)."""
    section = found.section
    micro = section.whole("micro_batch_size", least=1, most=10**7)
    found.take("micro_batch_size", "micro_batch_size", micro, 1)
    steps = section.whole("gradient_accumulation_steps", least=1, most=10**10)
    batch = section.whole("batch_size", least=1, most=10**9)
    found.take(ACCUMULATION, "gradient_accumulation_steps", steps, 1)
    if batch is not None and steps is not None:
        section.refuse("batch_size", "allowed: without gradient_accumulation_steps")
    if batch not in (None, micro or 1):
        found.note("batch_size", "counted with gradient_accumulation_steps 1, axolotl's default, which comes first")


def _read_recompute(found: Findings) -> None:
    section, key = found.section, "gradient_checkpointing"
    value = section.raw(key)
    if isinstance(value, str) and value.startswith(("offload", "unsloth")):
        found.give("recompute", key, "full")
        if value != _OFFLOADS:
            found.note(key, _INPUTS)
        return
    switched = section.flag(key)
    found.take("recompute", key, None if switched is None else "full" if switched else "none", "none")
    kwargs = "gradient_checkpointing_kwargs"
    own = section.raw(kwargs) is None and not any(is_on(section, one) for one in ("rl", "unfrozen_parameters"))
    place = mapping(section, kwargs)
    read_reentry(found, place, SWITCH, default=own or torch_decides(place))


def _read_offloaded(found: Findings, *, trains_all: bool) -> None:
    """Set activations on the host, which is TRL's class around recomputed layers where all weights train. Adapters take it in
    the place of recomputation (loaders/model.py), which is noted."""
    section = found.section
    value = section.raw("activation_offloading")
    older = section.raw("gradient_checkpointing") == _OFFLOADS
    key = "gradient_checkpointing" if older else "activation_offloading"
    if trains_all and (older or (not isinstance(value, str) and is_on(section, key))):
        found.give("offload_activations", key, "cpu")
    elif older or is_on(section, key):
        found.note(key, _INPUTS if older else f"layers are counted as recomputed: {_INPUTS}")


def _read_task(found: Findings) -> str | None:
    """Set the task. Without `rl` it is the model's own loss, memcalc's pretrain. Return `rl`."""
    section = found.section
    rl = section.choice("rl", _RL) if is_on(section, "rl") else None
    tasks = {"ipo": "dpo", "orpo": "dpo", "simpo": "dpo", "gdpo": "grpo"}
    if rl == "ebft":
        section.refuse("rl", f"allowed: {', '.join(_RL[:-1])}")
    if rl is not None:
        found.give("task", "rl", tasks.get(rl, rl))
    else:
        found.assume("task", "rl", "pretrain")
    if rl in ("orpo", "simpo"):
        found.give("precompute_reference", "rl", True)
        found.note("rl", "a loss without a reference model is counted as DPO's without one")
    elif rl in ("dpo", "ipo", "kto"):
        found.give("precompute_reference", "precompute_ref_log_probs", section.flag("precompute_ref_log_probs"))
    return rl


def _read_engine(found: Findings) -> str | None:
    """Set the engine and the degrees. FSDP is version 1 where none is named."""
    section = found.section
    version = section.whole("fsdp_version", 1, 2) or 1
    sharded = read_fsdp(found, default_version=version, needs_switch=False, offload_params=True)
    if "sequence_parallel_degree" in section and "context_parallel_size" not in section:
        found.give("cp", "sequence_parallel_degree", section.whole("sequence_parallel_degree", least=1, most=10**6))
    for key, option in _DEGREES.items():
        found.give(option, key, section.whole(key, least=1, most=10**6))
    shards = section.whole("dp_shard_size", least=1, most=10**6)
    replicas = section.whole("dp_replicate_size", least=1, most=10**6)
    if replicas is not None and replicas > 1 and shards is not None:
        cp = found.options["cp"].value if "cp" in found.options else 1
        found.give("shard_group", "dp_shard_size", shards * cp)  # ranks of a sequence shard, too
    if shards is not None or replicas is not None:
        degrees = [found.options[option].value for option in ("tp", "cp") if option in found.options]
        gpus = (shards or 1) * (replicas or 1)
        for degree in degrees:
            gpus *= degree
        found.give("gpus", "dp_shard_size" if shards is not None else "dp_replicate_size", gpus)
    cp = found.options.get("cp")
    if cp is not None and cp.value > 1:
        found.notes.append(f"{cp.where} {cp.value}: ring-flash-attn is counted as torch's own context parallelism")
    if not sharded and any(option in found.options and found.options[option].value > 1 for option in _DEGREES.values()):
        found.assume("engine", "fsdp_config", "ddp")  # and not the engine that memcalc has for these degrees
    return "fsdp2" if sharded else None


def _read_adapter(found: Findings, rl: str | None) -> str | None:
    """Set the options of LoRA and of the quantised base. Return the kind of adapter."""
    section = found.section
    adapter = section.choice("adapter", ("lora", "qlora")) if is_on(section, "adapter") else None
    four, eight = section.flag("load_in_4bit"), section.flag("load_in_8bit")
    if adapter is None:
        if four or eight:
            section.refuse("load_in_4bit" if four else "load_in_8bit", "allowed: with an adapter")
        return None
    if adapter == "qlora" and not four:
        section.refuse("load_in_4bit", "allowed: true with adapter qlora")
    _read_lora(found)
    if eight and adapter == "lora":
        kwargs = mapping(section, "gradient_checkpointing_kwargs")
        own_choice = rl is None and "gradient_checkpointing_kwargs" not in section
        give_eight_bits(found, "load_in_8bit", kwargs, "use_reentrant", reenters=own_choice)
    elif four and adapter == "qlora":
        own = mapping(section, "bnb_config_kwargs")
        kind = own.choice("bnb_4bit_quant_type", ("nf4", "fp4")) or "nf4"
        weights = _weights(section)
        compute = dtype(own, "bnb_4bit_compute_dtype") or weights
        double = Findings(own).switch("bnb_4bit_use_double_quant", True)
        give_quantized(found, "load_in_4bit", kind, weights if compute == "auto" else compute, double)
        give_storage(found, own, "bf16")  # loaders/model.py
    if rl is None and not section.flag("trust_remote_code") and not (adapter == "lora" and eight):
        _note_kernels(found)
    return adapter


def _read_lora(found: Findings) -> None:
    """Set LoRA. `lora_target_linear` adds all linear layers but the head to the named ones."""
    section = found.section
    if not section.flag("lora_target_linear"):
        read_adapters(found, _ADAPTERS)
        return
    read_adapters(found, _ADAPTERS._replace(targets="lora_target_linear_and_modules"))
    named = modules(section, "lora_target_modules")
    found.give("lora_targets", "lora_target_linear", BY_NAME if named is None else f"{BY_NAME},{named}")


def _note_kernels(found: Findings) -> None:
    """Note the fused kernels of LoRA, which axolotl switches on by itself where no key of theirs is there."""
    section = found.section
    keys = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
    given = [key for key in keys if key in section]
    if not given:
        found.notes.append(f"{section.where(keys[0])}: on by itself; peft's own adapters are counted")
    elif any(section.flag(key) for key in given):
        found.note(next(key for key in given if section.flag(key)), "peft's own adapters are counted")


def _weights(section: Section) -> str:
    """Return the dtype that weights are loaded in."""
    if _bf16(section) or section.flag("bfloat16"):
        return "bf16"
    return "fp16" if any(section.flag(key) for key in ("load_in_8bit", "fp16", "float16")) else "fp32"


def _bf16(section: Section) -> bool:
    """Tell whether bf16 is on; "auto", the default, is on where fp16 is not, as every GPU here has it."""
    value = section.raw("bf16")
    if value == "full":
        return True
    if value == "auto" or "bf16" not in section.content:
        return not section.flag("fp16")
    return bool(section.flag("bf16"))


def _read_precision(found: Findings, adapter: str | None, engine: str | None) -> None:
    """Set the precision: weights in 16 bits, with autocast over them.

    After peft's prepare_model_for_kbit_training axolotl casts norms and embeddings back, so its option stays off.
    """
    section = found.section
    if section.flag("fp8"):
        found.give("precision", "fp8", "fp8-mixed")
        return
    weights = _weights(section)
    is_bf16 = (_bf16(section) and section.raw("bf16") != "full") or bool(section.flag("bfloat16"))
    cast = "bf16" if is_bf16 else "fp16" if section.flag("fp16") and not _bf16(section) else None
    quantized = adapter == "qlora"
    result = combined(weights, cast, adapters=adapter is not None, engine=engine, quantized=quantized)
    key = next((key for key in ("bf16", "bfloat16", "fp16", "float16") if is_on(section, key)), "bf16")
    give_precision(found, key, result, is_given=key in section and engine != "deepspeed")
    if adapter is not None and section.flag("peft_autocast_adapter_dtype") is False and weights != "fp32":
        found.give("adapter_dtype", "peft_autocast_adapter_dtype", weights)


def _read_frozen(found: Findings) -> None:
    """Set what is frozen: all but parameters whose names match `unfrozen_parameters`."""
    section, key = found.section, "unfrozen_parameters"
    allowed = f"patterns of names without commas and repeated groups, and up to {_MOST_REPEATED} repetitions"
    patterns = [_ONE_OR_MORE.sub(r"\1\1*", pattern) for pattern in texts(section, key, allowed)]
    for pattern in patterns:
        if (
            set(pattern) & set("+,")
            or _REPEATED_GROUP.search(pattern)
            or len(_REPEATED.findall(pattern)) > _MOST_REPEATED
        ):
            section.refuse(key, f"allowed: {allowed}")
    if patterns:
        found.give("freeze", key, f"all-but:{'+'.join(patterns)}")


def _read_optimizer(found: Findings, engine: str | None) -> None:
    read_optimizer(found, "optimizer", "adamw_torch_fused")
    read_clipping(found)
    if engine == "deepspeed":
        for option in ("optimizer", "optimizer_implementation", "clip_grad_norm"):
            if option in found.options:
                found.options[option] = found.options[option]._replace(is_given=False)


def _read_attention(found: Findings) -> None:
    section = found.section
    if "attn_implementation" in section:
        read_attention(found, section, "attn_implementation")
        return
    key = next((key for key in _OLD_ATTENTION if is_on(section, key)), None)
    if key is not None:
        kind = _OLD_ATTENTION[key]
        found.give("attention", key, {"eager": "eager", FLASH: "flash"}.get(kind, "sdpa"))
        if kind not in ("eager", "sdpa", FLASH):
            found.note(key, "counted as torch's own fused attention (sdpa)")


def _note_fp32(found: Findings) -> None:
    """Note the weights that are cast to fp32, and back only for a fused kernel that wants 16 bits."""
    section = found.section
    attention = section.text("attn_implementation") or ""
    fused = any(is_on(section, key) for key, kind in _OLD_ATTENTION.items() if kind not in ("eager", "sdpa"))
    if _weights(section) != "fp32" and attention in ("", "eager", "sdpa") and not fused:
        found.notes.append(
            f"{section.where('attn_implementation')}: without flash attention axolotl keeps norms, embeddings and head in "
            "fp32; they are counted in 16 bits"
        )


def _read_kernels(found: Findings, rl: str | None) -> None:
    """Set Liger's parts, which are on one by one, and the loss."""
    section = found.section
    on = [key for key in (*_LIGER, "liger_cross_entropy", "liger_fused_linear_cross_entropy") if is_on(section, key)]
    named = " ".join(texts(section, "plugins", "names of plugins")).lower()
    cuts = "cut_cross_entropy" in named and section.flag("cut_cross_entropy") is not False
    if rl is not None:
        if on or cuts:
            found.note(on[0] if on else "plugins", "the trainer's own head and transformers' own layers are counted")
        return
    if on:
        give_parts(found, on[0], tuple(dict.fromkeys(_LIGER[key] for key in on if key in _LIGER)))
        fused, plain = "liger_fused_linear_cross_entropy" in on, "liger_cross_entropy" in on
        found.give("cross_entropy", on[-1], "fused" if fused else "liger" if plain else "eager")
    if cuts:
        found.give("cross_entropy", "plugins", "chunked")
        found.notes.append(f"{section.where('plugins')}: Cut Cross Entropy is counted as torch's linear cross-entropy")
    if is_on(section, "flash_attn_cross_entropy"):
        found.give("cross_entropy", "flash_attn_cross_entropy", "flash")
