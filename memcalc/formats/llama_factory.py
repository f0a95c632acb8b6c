"""LLaMA-Factory's files: TrainingArguments, with its own keys for models, data and fine-tuning.

Source: LLaMA-Factory at ff6d4d1: src/llamafactory/hparams/*.py, model/adapter.py, model/patcher.py,
model/model_utils/{checkpointing,attention,liger_kernel,quantization}.py, train/trainer_utils.py.
"""

from __future__ import annotations

from typing import Final

from memcalc.formats.found import Found
from memcalc.formats.reentry import OF_LLAMA_FACTORY, read_reentry
from memcalc.formats.section import Section
from memcalc.formats.trainer_adapters import BY_NAME, Adapters, give_eight_bits, give_quantized, read_adapters
from memcalc.formats.trainer_additions import note_tf32, read_noise
from memcalc.formats.trainer_args import NOTED, REFUSED, read_accelerator, read_batch, read_optimizer_of
from memcalc.formats.trainer_findings import Findings, deepspeed_file, is_on, modules, name, refuse_misspelt
from memcalc.formats.trainer_fsdp import read_fsdp
from memcalc.formats.trainer_keys import MATTER, OTHERS
from memcalc.formats.trainer_optimizers import LOW_RANK, read_clipping
from memcalc.formats.trainer_precision import autocast, combined, give_precision

_STAGES: Final = ("pt", "sft", "rm", "ppo", "dpo", "kto")
_TYPES: Final = ("lora", "full", "freeze", "oft")
_MEGATRON: Final = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
}
_ADAPTERS: Final = Adapters(
    "lora_rank", "lora_target", "additional_target", "use_dora", 8, BY_NAME, 0.0, every="all", every_means=BY_NAME
)
_MATTER: Final = (
    "finetuning_type", "cutoff_len", "lora_rank", "lora_target", "quantization_bit", "quantization_type", "pure_bf16",
    "double_quantization", "flash_attn", "disable_gradient_checkpointing", "freeze_trainable_layers", "neat_packing",
    "freeze_trainable_modules", "enable_liger_kernel", "additional_target", "pref_loss", "use_unsloth", "use_unsloth_gc",
    "upcast_layernorm", "ref_model", *_MEGATRON,
)  # fmt: skip
_OTHERS: Final = (
    "oft_target",
    "quantization_method",
    "freeze_extra_modules",
    "ref_model_adapters",
    "pref_beta",
    "packing",
)
_NOTED: Final = {
    "neat_packing": "rows are counted as single sequences of the whole length",
    "use_unsloth": "unsloth's kernels are not modelled; peft's and transformers' own are counted",
    "use_unsloth_gc": "inputs of layers are counted as kept on the GPU",
    "upcast_layernorm": "norms are counted in the dtype of the other weights",
    "upcast_lmhead_output": "logits are counted as transformers' own",
    "shift_attn": "attention is counted over whole sequences",
    "resize_vocab": "the vocabulary is counted as the model's configuration has it",
    "use_v1_kernels": "transformers' own kernels are counted",
    "use_dft_loss": "counted as the model's own loss",
    "use_eaft_loss": "counted as the model's own loss",
    "pref_ftx": "counted without the loss of supervised fine-tuning beside it",
    "adapter_name_or_path": "the adapters are taken to have the shapes that this file gives",
}
_REFUSED: Final = {
    "use_kt": "allowed: false (experts on the CPU are not modelled)",
    "mixture_of_depths": "allowed: nothing (mixture of depths is not modelled)",
    "use_llama_pro": "allowed: false (expanded layers are not modelled)",
    "use_badam": "allowed: false (BAdam is not modelled)",
    "use_asft_loss": "allowed: false (its reference model is not modelled)",
    "use_hyper_parallel": "allowed: false (HyperParallel is not modelled)",
    "freeze_language_model": "allowed: false (models of images are counted without what is not text)",
    "galore_layerwise": "allowed: false (updates within backward are not modelled)",
    "apollo_layerwise": "allowed: false (updates within backward are not modelled)",
}


def read_llama_factory(section: Section) -> Found:
    """Return what a file of LLaMA-Factory says. Raises InputError."""
    matter = (*MATTER, *_MATTER)
    refuse_misspelt(section, matter, {*matter, *OTHERS, *_OTHERS})
    found = Findings(section)
    found.refuse_each(REFUSED | _REFUSED)
    stage = section.choice("stage", _STAGES) or "sft"
    kind = section.choice("finetuning_type", _TYPES) or "lora"
    model = name(section, "model_name_or_path", "a bundled name, a Hub id or a path")
    found.model = None if model is None else section.value("model_name_or_path", model)
    read_batch(found)
    length = section.whole("cutoff_len", least=1, most=10**8)
    found.take("seq_len", "cutoff_len", length, 2048)
    _read_stage(found, stage, kind)
    if _read_megatron(found):
        read_clipping(found)
        found.note_each(NOTED | _NOTED)
        return found.found()
    _read_recompute(found)
    uses_deepspeed = deepspeed_file(found)
    engine = "deepspeed" if uses_deepspeed else "fsdp2" if read_fsdp(found) else None
    _read_precision(found, kind, engine)
    _read_trained(found, kind)
    read_optimizer_of(found, engine)
    _read_own_optimizers(found)
    read_accelerator(found)
    _read_attention(found)
    _read_liger(found, stage)
    read_noise(found)
    note_tf32(found)
    found.note_each(NOTED | _NOTED)
    return found.found()


def _read_stage(found: Findings, stage: str, kind: str) -> None:
    """Set the task. Its pt and sft have the model's own loss, which is memcalc's pretrain."""
    section = found.section
    if stage == "rm":
        section.refuse("stage", "allowed: pt, sft, dpo, kto (reward models are not modelled)")
    if stage == "ppo":
        section.refuse(
            "stage", "allowed: pt, sft, dpo, kto (its PPO has one model with a value head, and is not modelled)"
        )
    task = "pretrain" if stage in ("pt", "sft") else stage
    found.take("task", "stage", task if "stage" in section else None, task)
    if stage in ("pt", "sft"):
        packs = section.flag("packing")
        if packs or (packs is None and stage == "pt"):
            found.note("packing", "rows are counted as single sequences of the whole length")
        return
    found.note("stage", "counted with TRL's head, which makes no logits; LLaMA-Factory's own loss has all of them")
    if (section.text("pref_loss") or "") in ("orpo", "simpo") and stage == "dpo":
        found.give("precompute_reference", "pref_loss", True)
        found.note("pref_loss", "a loss without a reference model is counted as DPO's without one")
    elif "ref_model" in section and kind == "lora":
        section.refuse("ref_model", "allowed: nothing with adapters (a second model is not modelled)")
    elif "ref_model" in section:
        found.note("ref_model", "the reference is counted as a copy of the model that trains")


def _read_megatron(found: Findings) -> bool:
    """Set the engine and its degrees by Megatron's keys (USE_MCA or USE_MEGATRON_BRIDGE). Tell whether there are any."""
    section = found.section
    keys = [key for key in (*_MEGATRON, "use_distributed_optimizer", "sequence_parallel") if key in section]
    if not keys:
        return False
    found.give("engine", keys[0], "megatron")
    for key, option in _MEGATRON.items():
        found.give(option, key, section.whole(key, least=1, most=10**6))
    if "virtual_stages" in found.options and found.options["virtual_stages"].value > 1:
        found.give("schedule", "virtual_pipeline_model_parallel_size", "interleaved")
    found.take("sequence_parallel", "sequence_parallel", section.flag("sequence_parallel"), False)
    sharded = section.flag("use_distributed_optimizer")
    found.take("zero", "use_distributed_optimizer", None if sharded is None else int(sharded), 1)
    recompute = section.choice("recompute_granularity", ("full", "selective"))
    found.take("recompute", "recompute_granularity", recompute, "none")
    layers = section.whole("recompute_num_layers", least=1)
    if recompute == "full" and layers is not None:
        found.note("recompute_num_layers", "all layers are taken to be recomputed")
    cast, is_switched = autocast(found)
    found.take("precision", "bf16", f"{cast}-mixed" if is_switched and cast else None, "bf16-mixed")
    if section.choice("finetuning_type", _TYPES) in (None, "lora"):
        _read_megatron_adapters(found)
    return True


def _read_megatron_adapters(found: Findings) -> None:
    """Set the adapters of Megatron-Bridge, which are at all linear layers whatever the file asks for
    (_create_peft_config of train/megatron_bridge/config_builder.py)."""
    found.take("lora_rank", "lora_rank", found.section.whole("lora_rank", least=1, most=10**6), 8)
    found.take("lora_targets", "lora_target", None, "default")
    if found.section.raw("lora_target") not in (None, "all", ["all"]):
        found.note(
            "lora_target",
            "Megatron-Bridge's adapters are at all linear layers, and other targets are dropped with a warning",
        )


def _read_recompute(found: Findings) -> None:
    """Set recomputation, which is on unless the file switches it off."""
    key = "disable_gradient_checkpointing"
    off = found.section.flag(key)
    found.take("recompute", key, None if off is None else "none" if off else "full", "full")
    read_reentry(found, found.section, OF_LLAMA_FACTORY, default=not is_on(found.section, "use_unsloth_gc"))


def _read_precision(found: Findings, kind: str, engine: str | None) -> None:
    """Set the precision. Weights are loaded in the checkpoint's dtype, and what trains becomes fp32 unless pure_bf16."""
    section = found.section
    cast, is_switched = autocast(found)
    pure = bool(section.flag("pure_bf16"))
    key = "pure_bf16" if pure else "fp16" if cast == "fp16" else "bf16"
    if section.flag("fp8"):
        found.give("precision", "fp8", "fp8-mixed")
        return
    checkpoint = cast or "bf16"
    weights = checkpoint if pure or kind in ("lora", "oft", "freeze") else "fp32"
    if pure and cast is not None:
        cast = None
        found.note("pure_bf16", "counted without autocast over it")
    if kind == "freeze" and not pure and engine is None:
        weights = "fp32"
        found.note("finetuning_type", "frozen layers are counted in fp32; LLaMA-Factory keeps the checkpoint's dtype")
    result = combined(weights, cast, adapters=kind == "lora", engine=engine)
    if weights == checkpoint and engine is None:
        found.notes.append(f"{section.where('model_name_or_path')}: the checkpoint's dtype is taken to be {weights}")
    give_precision(found, key, result, is_given=(is_switched or pure) and engine != "deepspeed")


def _read_trained(found: Findings, kind: str) -> None:
    """Set adapters, frozen layers and the quantised base."""
    section = found.section
    if kind == "oft":
        section.refuse("finetuning_type", "allowed: lora, full, freeze (orthogonal fine-tuning is not modelled)")
    if kind == "lora":
        read_adapters(found, _ADAPTERS)
        if "additional_target" in section:
            found.note(
                "additional_target", "these modules are counted in the base's dtype; LLaMA-Factory makes them fp32"
            )
    if kind == "freeze":
        _read_frozen(found)
    bits = section.whole("quantization_bit", least=1, most=8)
    if bits is None:
        return
    if kind != "lora":
        section.refuse("quantization_bit", "allowed: with finetuning_type lora")
    if (section.text("quantization_method") or "bnb").lower() not in ("bnb", "bitsandbytes"):
        section.refuse("quantization_method", "allowed: bnb (others are not modelled)")
    if bits not in (4, 8):
        section.refuse("quantization_bit", "allowed: 4, 8")
    if bits == 8:
        give_eight_bits(found, "quantization_bit", section, "use_reentrant_gc", reenters=True)
        return
    four = section.choice("quantization_type", ("nf4", "fp4")) or "nf4"
    compute = autocast(found)[0] or "bf16"
    give_quantized(found, "quantization_bit", four, compute, found.switch("double_quantization", True))
    found.assume("quantize_storage", "quantization_bit", compute)  # model_utils/quantization.py


def _read_frozen(found: Findings) -> None:
    """Set what is frozen: all but the last N layers, or the first N for a number below 0."""
    section, key = found.section, "freeze_trainable_layers"
    number = section.number(key)
    layers = 2 if number is None else int(number)
    if number is not None and (number != layers or not layers or abs(layers) > 10**6):
        section.refuse(key, "allowed: a whole number above 0 (the last layers) or below 0 (the first)")
    if (modules(section, "freeze_trainable_modules") or "all") != "all":
        section.refuse("freeze_trainable_modules", "allowed: all (some modules of some layers are not modelled)")
    extra = modules(section, "freeze_extra_modules")
    parts = [f"last:{layers}" if layers > 0 else f"first:{-layers}", *(extra.split(",") if extra else ())]
    found.take("freeze", key, None if number is None else f"all-but:{'+'.join(parts)}", f"all-but:{'+'.join(parts)}")


def _read_own_optimizers(found: Findings) -> None:
    """Set the optimizers that have switches of their own."""
    section = found.section
    for key, rank, optimizer in (
        ("use_galore", "galore_rank", "galore-adamw"),
        ("use_apollo", "apollo_rank", "apollo-adamw"),
    ):
        if not section.flag(key):
            continue
        if section.text("optim") not in (None, "adamw_torch"):
            section.refuse("optim", f"allowed: adamw_torch with {key}")
        if section.whole(rank, least=1) != LOW_RANK:
            section.refuse(rank, f"allowed: {LOW_RANK}, the one that is modelled (LLaMA-Factory's default is 16)")
        found.give("optimizer", key, optimizer)
        found.options.pop("optimizer_implementation", None)
    for key, optimizer in (("use_adam_mini", "adam-mini"), ("use_muon", "muon")):
        if section.flag(key):
            found.give("optimizer", key, optimizer)
            found.options.pop("optimizer_implementation", None)


def _read_attention(found: Findings) -> None:
    section, key = found.section, "flash_attn"
    if isinstance(section.raw(key), bool):  # older versions had a switch
        kind = "fa2" if section.flag(key) else "auto"
    else:
        kind = section.choice(key, ("auto", "disabled", "off", "sdpa", "fa2", "fa3"))
    if kind in ("disabled", "off"):
        found.give("attention", key, "eager")
    elif kind in ("fa2", "fa3"):
        found.give("attention", key, "flash")
        found.give("flash_attention_version", key, 3 if kind == "fa3" else 2)
    elif kind == "sdpa":
        found.give("attention", key, "sdpa")


def _read_liger(found: Findings, stage: str) -> None:
    """Set Liger's kernels. Stages that read the logits have its plain loss, and here TRL's head."""
    key = "enable_liger_kernel"
    if not is_on(found.section, key):
        return
    if stage not in ("pt", "sft"):
        found.note(key, "Liger's layers are counted as transformers' own, which keep as much or more")
        return
    found.give("kernels", key, "fused")
    found.give("cross_entropy", key, "fused")
