"""TrainingArguments of transformers, and what TRL's and alignment-handbook's scripts add to it.

Source: transformers/training_args.py (5.23), trl/trainer/base_config.py, sft_config.py, dpo_config.py, kto_config.py,
model_config.py, trl/scripts/sft.py (1.16).
"""

from __future__ import annotations

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
from memcalc.formats.trainer_additions import note_tf32, read_additions
from memcalc.formats.trainer_findings import Findings, deepspeed_file, is_on, mapping, name, refuse_misspelt
from memcalc.formats.trainer_fsdp import read_fsdp
from memcalc.formats.trainer_kernels import read_attention, read_liger
from memcalc.formats.trainer_keys import BATCH, MATTER, OTHERS, RECOMPUTE
from memcalc.formats.trainer_optimizers import read_clipping, read_optimizer
from memcalc.formats.trainer_precision import autocast, combined, dtype, give_precision
from memcalc.formats.trainer_tasks import generates, has_own_loss, read_task

MODEL: Final = ("model_name_or_path", "model_name", "model_id", "model_path", "base_model", "model")
_LENGTHS: Final = ("max_length", "max_seq_length", "max_seq_len", "model_max_length", "block_size", "cutoff_len")
"""TRL's names of a sequence's length, old ones too, and those of known scripts (run_clm.py, FastChat's)."""
_TRL_LENGTH: Final = 1024
_ADAPTERS: Final = Adapters("lora_r", "lora_target_modules", "lora_modules_to_save", "use_dora", 16, "default", 0.05)
COMPILED: Final = "compiled code is not modelled; each operator is counted, which as a rule needs more memory and time"
NOTED: Final = {
    **dict.fromkeys(("torch_compile", "torch_compile_mode", "torch_compile_backend", "torchdynamo"), COMPILED),
    "auto_find_batch_size": "the batch is taken to fit as it is given",
    "ddp_bucket_cap_mb": "buckets of 25 MiB, torch's default, are counted",
    "torch_empty_cache_steps": "the allocator's cache is taken to be kept",
    "label_smoothing_factor": "the loss is counted without label smoothing, which reads all logits once more",
    "half_precision_backend": "torch's autocast is counted",
}
"""Keys of TrainingArguments, old ones too, that change memory or time and have no option."""
_NOTED_HERE: Final = {
    "sync_ref_model": "the steps that mix the reference model are not counted",
    "router_aux_loss_coef": "the router's loss is counted as the model's configuration has it",
}
REFUSED: Final = {
    "use_cpu": "allowed: false (only training on GPUs is modelled)",
    "no_cuda": "allowed: false (only training on GPUs is modelled)",
    "sharded_ddp": "allowed: nothing (fairscale's engine is not modelled; use fsdp or deepspeed)",
    "parallelism_config": "is not read here; allowed: in accelerate's own file (--accelerate)",
}
_REFUSED_HERE: Final = {
    "teacher_model_name_or_path": "allowed: nothing (distillation from a teacher is not modelled)",
    "lora_target_parameters": "allowed: nothing; name the experts' layers among the modules (w1, w3 or gate_proj, up_proj)",
}


def read_trainer_args(section: Section) -> Found:
    """Return what TrainingArguments say, with TRL's keys or a script's own beside them. Raises InputError."""
    refuse_misspelt(section, MATTER, {*MATTER, *OTHERS})
    found = Findings(section)
    found.refuse_each(REFUSED | _REFUSED_HERE)
    is_trl = read_task(found)
    _read_model(found)
    read_batch(found)
    _read_length(found, is_trl=is_trl)
    read_recompute(found, default=is_trl)
    uses_deepspeed = deepspeed_file(found)
    engine = "deepspeed" if uses_deepspeed else "fsdp2" if read_fsdp(found) else None
    _read_precision(found, is_trl=is_trl, engine=engine)
    read_optimizer_of(found, engine)
    read_accelerator(found)
    _read_attention(found)
    read_liger(found, ("use_liger_kernel", "use_liger"), own_loss=has_own_loss(found))
    read_additions(found, is_sft=is_trl and found.options["task"].value == "sft")
    note_tf32(found)
    found.note_each(NOTED | _NOTED_HERE)
    return found.found()


def _read_model(found: Findings) -> None:
    section = found.section
    key = section.first(*MODEL)
    if isinstance(section.raw(key), dict):  # a script's own section
        return
    model = name(section, key, "a bundled name, a Hub id or a path")
    if model is not None:
        found.model = section.value(key, model)


def read_batch(found: Findings) -> None:
    """Set the micro-batch and accumulation, with TrainingArguments' defaults."""
    section = found.section
    key = section.first(*BATCH)
    found.take("micro_batch_size", key, section.whole(key, least=1, most=10**7), 8)
    steps = section.whole("gradient_accumulation_steps", least=1, most=10**10)
    found.take(ACCUMULATION, "gradient_accumulation_steps", steps, 1)


def read_recompute(found: Findings, *, default: bool) -> None:
    """Set recomputation by the key that says it, or its old name; `default` is the tool's."""
    section = found.section
    key = section.first(*RECOMPUTE)
    switched = section.flag(key)
    found.take("recompute", key, None if switched is None else _word(switched), _word(default))
    for kwargs in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        _note_kwargs(found, mapping(section, kwargs))
    if switched or (default and switched is None):
        own = mapping(section, section.first("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"))
        read_reentry(found, own, SWITCH, default=torch_decides(own))


def _word(is_on: bool) -> str:
    return "full" if is_on else "none"


def _note_kwargs(found: Findings, kwargs: Section) -> None:
    """Note what `gradient_checkpointing_kwargs` say beside use_reentrant, which keeps as much."""
    every = kwargs.whole("every_n_layers", least=1)
    if every is not None and every > 1:
        found.notes.append(f"{kwargs.where('every_n_layers')} {every}: each layer is taken to be recomputed")
    for key in ("selective", "offload"):
        if is_on(kwargs, key):
            found.notes.append(
                f"{kwargs.where(key)}: layers are taken to be recomputed as a whole, with inputs on the GPU"
            )


def _read_length(found: Findings, *, is_trl: bool) -> None:
    section = found.section
    key = section.first(*_LENGTHS)
    length = section.whole(key, least=1, most=10**8)
    if length is not None:
        found.give("seq_len", key, length)
    elif generates(found):  # the data decides how long prompts are
        return
    elif is_trl and "max_length" in section.content:
        found.note("max_length", "sequences are not truncated; give --seq-len")
    elif is_trl:
        found.assume("seq_len", "max_length", _TRL_LENGTH)


def _read_precision(found: Findings, *, is_trl: bool, engine: str | None) -> None:
    """Set precision, adapters and the quantised base, which depend on each other."""
    section = found.section
    cast, is_switched = autocast(found, "bf16" if is_trl else None)
    own = mapping(section, "model_init_kwargs")
    place, key = next(
        ((one, key) for one in (own, section) for key in ("dtype", "torch_dtype") if key in one), (section, "dtype")
    )
    weights = dtype(place, key)
    is_given = is_switched or weights in ("bf16", "fp16")  # over fp32 weights autocast may be accelerate's
    if weights == "auto" or (
        is_trl and weights is None and any(one in section.content for one in ("dtype", "torch_dtype"))
    ):
        weights = cast or "bf16"
        found.note(key, f"the checkpoint's dtype is taken to be {weights}")
    elif weights is None and "train_mode" in section:  # Firefly's train.py loads in 16 bits
        weights = "fp16" if cast == "fp16" else "bf16"
    elif weights is None:
        weights = "fp32"
        if not is_trl and is_switched and cast is not None and engine is None:
            found.notes.append(f"{section.where('dtype')}: not there, so weights are taken to be loaded in float32")
    adapted = _read_adapters(found, is_trl=is_trl)
    quantized = _read_quantized(found, weights)
    result = combined(weights, cast, adapters=adapted, engine=engine, quantized=quantized)
    switch = "fp16" if cast == "fp16" else "bf16"
    give_precision(found, switch if is_switched else key, result, is_given=is_given and engine != "deepspeed")
    if adapted and quantized and is_trl and weights == "bf16":
        found.assume("adapter_dtype", "use_peft", "bf16")  # SFTTrainer and DPOTrainer cast what trains to bf16


def _read_adapters(found: Findings, *, is_trl: bool) -> bool:
    """Set the options of adapters if the file switches them on. Tell whether it does.

    A script of somebody's own that has a rank and no switch is taken to train adapters.
    """
    section = found.section
    rank = section.first("lora_r", "lora_rank")
    targets = section.first("lora_target_modules", "lora_target")
    if _mode(section) in ("lora", "qlora"):
        read_adapters(found, _ADAPTERS._replace(rank=rank, targets=targets, default_targets="all-linear"))
        return True
    if is_on(section, "use_peft") or is_on(section, "use_lora"):
        read_adapters(found, _ADAPTERS._replace(rank=rank, targets=targets))
        return True
    if rank not in section or any(section.raw(key) is not None for key in ("use_peft", "use_lora", "train_mode")):
        return False
    if is_trl and rank == "lora_r":  # TRL's ModelConfig has both keys
        found.note(rank, "use_peft is not set, so all weights train")
        return False
    read_adapters(found, _ADAPTERS._replace(rank=rank, targets=targets, default_targets=BY_NAME))
    where = "" if targets in section else ", at all linear layers"
    loaded = (
        "" if any(one in section for one in ("load_in_4bit", "load_in_8bit")) else "; --quantize nf4 is QLoRA's base"
    )
    found.note(rank, f"no key says whether adapters train: they are taken to{where}{loaded}")
    return True


def _mode(section: Section) -> str:
    """Return Firefly's word for what trains: full, lora, qlora; "" in other files (Source: Firefly's train.py)."""
    return str(section.raw("train_mode") or "").lower()


def _read_quantized(found: Findings, weights: str) -> bool:
    section = found.section
    if section.flag("load_in_8bit"):
        if section.flag("load_in_4bit"):
            section.refuse("load_in_8bit", "contradicts load_in_4bit; allowed: one of them")
        kwargs = mapping(section, "gradient_checkpointing_kwargs")
        give_eight_bits(found, "load_in_8bit", kwargs, "use_reentrant", reenters=False)
        return True
    if _mode(section) == "qlora" and "load_in_4bit" not in section:
        found.note("train_mode", "the base is in nf4 with nested scales, as Firefly has it")
        give_quantized(found, "train_mode", "nf4", weights, section.default("train_mode", True))
        give_storage(found, section, "uint8")
        if not has_own_loss(found):
            found.give("prepare_kbit_training", "train_mode", True)
        return True
    if not section.flag("load_in_4bit"):
        return False
    key = "bnb_4bit_quant_type"
    kind = section.choice(key, ("nf4", "fp4")) or "nf4"
    compute = dtype(section, "bnb_4bit_compute_dtype") or weights
    double = section.first("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "use_nested_quant")
    compute = weights if compute == "auto" else compute
    give_quantized(found, "load_in_4bit", kind, compute, found.switch(double, False))
    give_storage(found, section, "uint8")
    return True


def read_optimizer_of(found: Findings, engine: str | None) -> None:
    """Set the optimizer and clipping, which are defaults where DeepSpeed's file may say its own."""
    read_optimizer(found, "optim", "adamw_torch_fused")
    if is_on(found.section, "adafactor"):
        found.give("optimizer", "adafactor", "adafactor")
        found.options.pop("optimizer_implementation", None)
    read_clipping(found)
    if engine == "deepspeed":
        for option in ("optimizer", "optimizer_implementation", "clip_grad_norm"):
            if option in found.options:
                found.options[option] = found.options[option]._replace(is_given=False)


def read_accelerator(found: Findings) -> None:
    """Read `accelerator_config`, a mapping or a path to one."""
    section, key = found.section, "accelerator_config"
    value = section.raw(key)
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        found.note(key, "this file is not read; accelerate's defaults are assumed")
        return
    config = mapping(section, key)
    if config.flag("split_batches"):
        found.notes.append(f"{config.where('split_batches')}: the batch is taken to be a GPU's own all the same")
    if mapping(config, "gradient_accumulation_kwargs").flag("sync_each_batch"):
        found.options["sync_each_micro_batch"] = config.value("gradient_accumulation_kwargs.sync_each_batch", True)


def _read_attention(found: Findings) -> None:
    own = mapping(found.section, "model_init_kwargs")
    if "attn_implementation" in own:
        read_attention(found, own, "attn_implementation")
    elif "attn_implementation" in found.section:
        read_attention(found, found.section, "attn_implementation")
    else:
        for key in ("use_flash_attention_2", "use_flash_attention", "use_flash_attn"):
            if is_on(found.section, key):
                found.give("attention", key, "flash")
