"""Options and files as one setup: given options first, then what files say, then the defaults of their tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from memcalc.errors import InputError, one_line
from memcalc.formats.batches import with_batches
from memcalc.formats.deepspeed import Others
from memcalc.formats.flash_together import with_flash_where_modelled
from memcalc.formats.found import ACCUMULATION, REPLICAS, Found, Value
from memcalc.formats.fsdp1_together import with_fsdp1_where_modelled
from memcalc.formats.loading import load
from memcalc.formats.model_together import with_what_the_model_has
from memcalc.formats.optimizers_together import with_optimizer_of_engine
from memcalc.formats.quantized_shards import check_flat, with_adapters_as_cast
from memcalc.formats.reentry import with_reentry_of_trainer
from memcalc.formats.stand_ins_together import with_stand_ins
from memcalc.formats.together import (
    with_loss_of_engine,
    with_precision_of_engine,
    without_what_is_not_modelled,
)
from memcalc.formats.trainer_additions import without_unmodelled_additions
from memcalc.inputs.file_options import FILES, FromFiles
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import Options, check_options, option_name

_WINNERS: Final = {
    "optimizer": "deepspeed",  # transformers' Trainer uses the section if there is one
    "optimizer_implementation": "deepspeed",
    "precision": "training_args",  # TrainingArguments sets accelerate's own variable
}
"""An option of which two files may say different things -> the one that its tools use."""
_GIVES_WAY: Final = ("optimizer_implementation", "attention", "kernels", "cross_entropy")
"""The options of files that give way where the engine or the model has nothing like them."""
_OF_LAYERS: Final = ("attention", "flash_attention_version")
"""The options of a trainer's file that are of transformers' layers."""
_MATCHED: Final = ("micro_batch_size", ACCUMULATION)
"""The options that the Trainer compares with a DeepSpeed file's (transformers/integrations/deepspeed.py, fill_match)."""
_DECIDES: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": (
        "zero", "shard_group", REPLICAS, "offload_optimizer", "offload_params", "sequence_parallel", "cross_entropy",
        "cp_comm_type", "schedule", "virtual_stages", "first_stage_layers", "last_stage_layers", "sync_each_micro_batch",
        "grad_dtype", "kernels", "attention", "flash_attention_version", "optimizer_implementation",
        "gradient_accumulation_fusion", "attention_mask_in_dataloader", "reduce_bucket_size", "max_live_parameters",
        "max_reuse_distance",
        "param_persistence_threshold", "prefetch_bucket_size", "sub_group_size", "overlap_comm",
        "zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size",
        "nvme_optimizer_buffer_count", "nvme_buffer_count", "nvme_buffer_size", "nvme_max_in_cpu", "nvme_threads",
        "fp8_recipe", "fp8_param_gather", "precision_aware_optimizer", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
        "use_orig_params", "backward_prefetch", "forward_prefetch", "servers", "comm_hook", "autotp", "recompute_modules",
        "offload_modules",
    ),
    "offload_optimizer": ("nvme_optimizer_buffer_count",),
    "offload_params": ("nvme_buffer_count", "nvme_buffer_size", "nvme_max_in_cpu"),
    "tp": ("sequence_parallel", "cross_entropy", "etp"),
    "pp": ("schedule", "virtual_stages", "first_stage_layers", "last_stage_layers"),
    "cp": ("cp_comm_type",),
    "precision": ("grad_dtype",),
    "recompute": ("recompute_layers", "recompute_modules", "reentrant_checkpoints"),
    "gpus": ("dp", "gpus_per_node"),
    "lora_rank": (
        "lora_targets", "lora_dropout", "lora_bias", "adapter_dtype", "dora", "modules_to_save", "quantize",
        "double_quant", "quantize_compute_dtype", "prepare_kbit_training", "base_dtype", "quantize_storage",
    ),
    "quantize": ("double_quant", "quantize_compute_dtype", "prepare_kbit_training", "quantize_storage"),
}  # fmt: skip
"""An option -> those of a file that go with the file's value of it: another value that is given drops them."""


class Read(NamedTuple):
    """A file that was read."""

    option: str
    folder: Path
    found: Found


def merged(model: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any], FromFiles]:
    """Return the model, the options and where they came from. See `memcalc.formats.given.with_files`."""
    given = {name: value for name, value in options.items() if name not in FILES and value is not None}
    check_options({name: value for name, value in given.items() if name in Options._fields})
    files = _read_all({name: options[name] for name in FILES if options.get(name) is not None}, given, model)
    _check_one_model(model, files)
    model = _model(model, given, files)
    trainer = [  # FSDP in the Trainer's own arguments has decided already what they mean
        one.found.options.get("precision")
        for one in files
        if one.option == "training_args" and "engine" not in one.found.options
    ]
    said = with_precision_of_engine(given, _said(files, given), trainer[0] if trainer else None)
    of_layers = {name: _of_trainer(files, name) for name in _OF_LAYERS}
    said = _that_still_go(said, given, {name for name, value in of_layers.items() if value is not None})
    said, of_trainer = with_reentry_of_trainer(given, said)
    check_flat(given, said)
    said, of_fsdp1 = with_fsdp1_where_modelled(model, given, said)
    said = with_adapters_as_cast(given, said)
    said, of_optimizer = with_optimizer_of_engine(given, said, _of_deepspeed_file(files))
    said, stand_ins = with_stand_ins(model, given, said)
    said, left_out = without_what_is_not_modelled(given, said)
    said, of_model = with_what_the_model_has(model, given, said)
    said, loss = with_loss_of_engine(model, given, said)
    said, additions = without_unmodelled_additions(model, given, said)
    said, of_flash = with_flash_where_modelled(model, given, said, _of_trainer(files, "attention"))
    found, origins = with_batches(given, said)
    of_gpus = _of_gpus(files, given) + _without_gpus(files, found, given)
    counted = {name: value for name, value in said.items() if name != "attention" or name not in given}
    every = _of_what_counts((note for one in files for note in one.found.notes), _said(files, given), counted)
    notes = tuple(
        dict.fromkeys(
            [
                *every,
                *of_fsdp1,
                *of_optimizer,
                *stand_ins,
                *left_out,
                *of_model,
                *loss,
                *of_trainer,
                *additions,
                *of_flash,
                *of_gpus,
            ]
        )
    )
    return model, {**found, **given}, FromFiles(origins, notes)


def _of_what_counts(notes: Iterable[str], before: Mapping[str, Value], after: Mapping[str, Value]) -> Iterator[str]:
    """Yield the notes of files, without those on how a value is counted that has given way to another."""
    gone = tuple(f"{before[name].where} " for name in _GIVES_WAY if name in before and name not in after)
    for note in notes:
        if not note.startswith(gone):
            yield note


def _of_gpus(files: list[Read], given: Mapping[str, Any]) -> list[str]:
    """Return a note on degrees of a file that make another number of GPUs than is given."""
    says = next((one.found.options.get("gpus") for one in files if one.option == "torchtitan"), None)
    if says is None or given.get("gpus") in (None, says.value):
        return []
    return [f"{says.where}: the degrees make {says.value} GPUs; --gpus {one_line(given['gpus'])} replaces them"]


def _without_gpus(files: list[Read], found: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return a note on Megatron's distributed optimizer if nothing says how many GPUs share its states."""
    shards = next((one.found.options.get("zero") for one in files if one.option == "megatron_args"), None)
    if shards is None or not shards.value or given.get("zero") == 0 or {"gpus", "dp"} & (found.keys() | given.keys()):
        return []
    return [f"{shards.where}: the launcher says how many GPUs share the states; without --gpus one has them all"]


def _of_trainer(files: list[Read], option: str) -> Value | None:
    """Return what the file of a trainer says of an option; None without one."""
    return next((one.found.options.get(option) for one in files if one.option == "training_args"), None)


def _of_deepspeed_file(files: list[Read]) -> Mapping[str, Value]:
    """Return what a DeepSpeed file says; nothing without one."""
    found = [one.found.options for one in files if one.option == "deepspeed"]
    return found[0] if found else {}


def _read_all(sources: Mapping[str, Any], given: Mapping[str, Any], model: Any) -> list[Read]:
    """Read the given files, and the files that these name; DeepSpeed's last, as "auto" in it asks for the others."""
    files: list[Read] = []
    waiting = dict(sources)
    for option in FILES:
        if option in waiting and option != "deepspeed":
            one = _of_option(option, waiting[option], model)
            files.append(one)
            for name, value in one.found.files.items():
                if name not in waiting:
                    waiting[name] = _beside(value, one.folder) if isinstance(value.value, str) else value.value
    if "deepspeed" in waiting:
        launched = any(one.option in ("training_args", "accelerate") for one in files)
        others = Others(_hidden_size(_chosen(model, files)), _half(given, files), launched, _stage(given))
        files.append(_read("deepspeed", waiting["deepspeed"], others))
    return files


def _of_option(option: str, source: Any, model: Any) -> Read:
    """Return what the file of an option says beside the given model, if there is one."""
    if option == "megatron_args":
        return _of_megatron(source, model)
    if option == "torchtitan" and model is not None:
        return _read(option, source, _loaded(model))
    return _read(option, source)


def _read(option: str, source: Any, *others: Others | Model) -> Read:
    """Return what a file, or the mapping of one, says."""
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise InputError(f"{option_name(option)} {one_line(source)}: allowed: a path, or the parsed mapping")
    named = cast("str | os.PathLike[str] | Mapping[str, Any]", source)
    folder = Path() if isinstance(named, Mapping) else Path(named).parent
    file, content = load(option_name(option), named)
    if option == "training_args":
        content = _with_its_fsdp_file(file, content, folder)
    return Read(option, folder, _reader(option)(file, content, *others))


def _with_its_fsdp_file(file: str, content: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return TrainingArguments with the JSON that `fsdp_config` names in its place."""
    named = content.get("fsdp_config")
    if not isinstance(named, str) or not named.strip():
        return content
    path = _beside(Value(named, f"{file or '--training-args'}: fsdp_config"), folder)
    return {**content, "fsdp_config": load("--training-args", path)[1]}


def _of_megatron(source: Any, model: Any) -> Read:
    """Return what Megatron-LM's arguments say; of the model only if no other one is given."""
    from memcalc.formats.megatron import read
    from memcalc.formats.megatron_arguments import arguments_of

    return Read("megatron_args", Path(), read(*arguments_of(source), with_model=model is None))


def _reader(option: str) -> Callable[..., Found]:
    from importlib import import_module

    return import_module(f"memcalc.formats.{option}").read


def _beside(named: Value, folder: Path) -> str:
    """Return the path of a file that another one names: as its tool sees it, from the working directory; else from the
    file's folder or one above it. Raises InputError if there is none."""
    for parent in (Path(), folder, *folder.resolve().parents):
        path = parent / named.value
        if path.is_file():
            return str(path)
    instead = ", or --deepspeed FILE in its place" if "deepspeed" in named.where.rpartition(": ")[2] else ""
    raise InputError(
        f"{named.where} {one_line(named.value)}: no such file; allowed: a path from the working directory{instead}"
    )


def _chosen(model: Any, files: list[Read]) -> Any:
    """Return the model that was given, or that a file names."""
    if model is not None:
        return model
    return next((one.found.model for one in files if one.found.model is not None), None)


def _model(model: Any, given: Mapping[str, Any], files: list[Read]) -> Any:
    """Return the loaded model; None if there is none. A refusal says which file names it."""
    chosen = None if "params" in given else _chosen(model, files)
    return None if chosen is None else _loaded(chosen)


def _check_one_model(model: Any, files: list[Read]) -> None:
    """Raise InputError for a file of layers, which is a model, beside another model."""
    if model is not None and any(one.option == "layers" for one in files):
        raise InputError("--layers: is a model, and so is --model; give one of them")


def _loaded(named: Any) -> Any:
    if not isinstance(named, Value):
        return load_model(named)
    try:
        return load_model(named.value)
    except InputError as error:
        raise InputError(f"{error} (from {named.where}; --model replaces it)") from None


def _hidden_size(chosen: Any) -> Callable[[str], int]:
    """Return what finds the hidden size that "auto" asks for."""

    def find(where: str) -> int:
        if chosen is None:
            raise InputError(f'{where} "auto": depends on the hidden size of the model; give --model')
        model: Model = _loaded(chosen)
        size = getattr(getattr(model.program, "hidden", None), "size", None) or (model.fields or {}).get("hidden_size")
        if not isinstance(size, int):
            raise InputError(f'{where} "auto": {model.name} has no hidden size; allowed: a whole number')
        return size

    return find


def _stage(given: Mapping[str, Any]) -> int | None:
    """Return the ZeRO stage that an option gives; None without one, and for a value that is refused later."""
    zero = given.get("zero")
    return zero if isinstance(zero, int) and not isinstance(zero, bool) else None


def _half(given: Mapping[str, Any], files: list[Read]) -> str | None:
    """Return the 16-bit dtype of mixed precision that options or files ask for; bf16, memcalc's default, if none does."""
    values = [given["precision"]] if "precision" in given else []
    values += [one.found.options["precision"].value for one in files if "precision" in one.found.options]
    name = str(values[0]) if values else "bf16"
    return name.split("-")[0] if name.startswith(("bf16", "fp16")) else None


# --- options


def _said(files: list[Read], given: Mapping[str, Any]) -> dict[str, Value]:
    """Return what the files say of each option: what one gives before another's default. Raises InputError if two give
    different values."""
    out: dict[str, Value] = {}
    for option in dict.fromkeys(name for one in files for name in one.found.options):
        values = {one.option: one.found.options[option] for one in files if option in one.found.options}
        out[option] = _of_several(option, values, is_replaced=option in given)
    return {option: value for option, value in out.items() if value.value is not None}


def _that_still_go(said: Mapping[str, Value], given: Mapping[str, Any], stays: Set[str]) -> dict[str, Value]:
    """Return what files say, without what went with a value that a given option replaces. `stays`: options that the file of a
    trainer says of the model's layers, whatever the engine is."""
    replaced = [name for name in _DECIDES if name in given and name in said and given[name] != said[name].value]
    gone = {option for name in replaced for option in _DECIDES[name]} - stays
    return {name: value for name, value in said.items() if name not in gone}


def _of_several(option: str, values: Mapping[str, Value], *, is_replaced: bool) -> Value:
    given = {name: value for name, value in values.items() if value.is_given}
    said = given or dict(values)
    if option == "recompute":  # whoever asks for it gets it
        return next((value for value in said.values() if value.value != "none"), next(iter(said.values())))
    if "deepspeed" in given and "training_args" in values and option in _MATCHED:
        given = {**given, "training_args": values["training_args"]}  # its defaults have to match, too
        said = given
    if "deepspeed" in said and option == "precision":
        return _of_deepspeed(said)
    different = {repr(value.value) for value in given.values()}
    if len(different) > 1 and not is_replaced and _WINNERS.get(option) not in said:
        first, second, *_ = said.values()
        raise InputError(
            f"{second.where} {one_line(second.value)}: contradicts {first.where} {one_line(first.value)}; allowed: the same in "
            f"both, or {_replacement(option)}"
        )
    winner = _WINNERS.get(option)
    return said[winner] if winner in said else next(iter(said.values()))


def _of_deepspeed(said: Mapping[str, Value]) -> Value:
    """Return DeepSpeed's precision. Another file that asks for another 16-bit dtype is refused, as the Trainer does."""
    own = said["deepspeed"]
    for name, value in said.items():
        other = str(value.value).split("-")[0]
        if name != "deepspeed" and other in ("bf16", "fp16") and not str(own.value).startswith(other):
            raise InputError(
                f"{own.where}: {own.value} contradicts {value.where} {one_line(value.value)}; allowed: the same in both"
            )
    return own


def _replacement(option: str) -> str:
    return "--global-batch-size" if option == ACCUMULATION else option_name(option)
