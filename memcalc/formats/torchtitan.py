"""torchtitan's TOML up to v0.2.2: its trainer under FSDP2, DDP or on one GPU, and the model of its flavor.

Source: torchtitan/train.py, torchtitan/distributed/utils.py, distributed/activation_checkpoint.py and
torchtitan/models/llama3/infra/parallelize.py of v0.2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, cast

from memcalc.errors import InputError, one_line
from memcalc.formats.found import ACCUMULATION, Found, Value
from memcalc.formats.section import Section
from memcalc.formats.torchtitan_config import TitanConfig, named
from memcalc.formats.torchtitan_degrees import Degrees, degrees_of
from memcalc.formats.torchtitan_models import NAMES, TitanModel, flavors, titan_model
from memcalc.formats.torchtitan_notes import notes_of
from memcalc.formats.torchtitan_pipeline import batches, stages
from memcalc.inputs.model import Model

_DTYPES: Final = ("float32", "bfloat16")
_MODES: Final = ("none", "full", "selective", "memory_budget")
_VOCABULARIES: Final = {"tokenizer.model": 128256, "test_tiktoken.model": 2256}
"""Words of the tokenizers that old debug models took their vocabulary from, by the file's name."""
_OLD_NAMES: Final = {"llama": "llama2", "llama3_ft": "llama3", "ft.llama3": "llama3"}
_SIMPLE_FSDP: Final = "simple_fsdp"
_HUGGING_FACE: Final = ("transformers_modeling_backend", "transformers_backend")
_REFUSED: Final = {
    "gpt_oss": "transformers' gpt_oss has eager attention alone in memcalc, which makes whole matrices of scores; "
    "torchtitan's has FlexAttention",
    "flux": "makes images, which is not modelled",
}
_REFUSED_WITH_ANY: Final = ("flux",)
"""The models whose step is no language model's."""


class _Model(NamedTuple):
    """The model of a file."""

    value: Value | None
    titan: TitanModel | None
    notes: tuple[str, ...]

    @property
    def layers(self) -> int | None:
        """Return the number of layers, if the file tells it."""
        return None if self.titan is None else self.titan.layers


class _Part(NamedTuple):
    """Some options, and notes on what they leave out."""

    options: Mapping[str, Value]
    notes: tuple[str, ...] = ()


def read(file: str, content: Mapping[str, Any], other: Model | None = None) -> Found:
    """Return what torchtitan's TOML says of a setup. Raises InputError that names the key.

    `other`: the model that is given in place of the file's, of which only the step is then read.
    """
    config = TitanConfig(file, content)
    seq_len = config.whole(2048, "training.seq_len")
    model = _model(config, seq_len.value) if other is None else _replaced(config, other)
    added = config.unknown_keys()
    if content and not _is_of_torchtitan(content, added):
        raise InputError(f"--torchtitan {file}: has no key of torchtitan's; expected its TOML")
    degrees = degrees_of(config, has_experts=model.titan is None or model.titan.experts)
    layers = model.layers if other is None else other.layers
    parts = [
        _sharding(config, degrees),
        _precision(config, degrees),
        _batch(config, degrees, layers),
        _recomputation(config, degrees, layers),
        _optimizer(config, degrees),
    ]
    options: dict[str, Value] = {"seq_len": seq_len}
    notes = [*model.notes, *degrees.notes]
    for part in [_Part(degrees.options), *parts]:
        options |= part.options
        notes += part.notes
    notes += notes_of(config, degrees)
    if added:
        whose = f"keys of {one_line(config.own_keys_of)}" if config.own_keys_of else "no keys of torchtitan's"
        notes.append(f"{config.top.file or config.top.option}: {named(added)}: {whose}, which are not read")
    return Found(options, model.value, notes=tuple(notes))


def _is_of_torchtitan(content: Mapping[str, Any], unknown: Collection[str]) -> bool:
    """Tell whether a file has a key that torchtitan knows: without any it is another tool's."""
    for section, keys in content.items():
        own: Mapping[str, Any] = cast("Mapping[str, Any]", keys) if isinstance(keys, Mapping) else {}
        if section not in unknown and any(f"{section}.{key}" not in unknown for key in own):
            return True
    return False


def _model(config: TitanConfig, seq_len: int) -> _Model:
    """Return the model. Raises InputError for a name or a flavor that torchtitan does not have, or memcalc does not."""
    section = config.section("model")
    given, flavor = section.text("name") or "llama3", section.text("flavor") or "debugmodel"
    if given in _HUGGING_FACE:
        return _of_hugging_face(config, flavor)
    family, name = _family(given)
    custom, key = config.at("experimental.custom_import", "experimental.custom_model_path")
    if name in _REFUSED:
        section.refuse("name", f"{_REFUSED[name]}; allowed: {', '.join(NAMES)}")
    titan = titan_model(name, flavor, seq_len, _vocabulary(section, name, flavor))
    if titan is None and custom.text(key):
        note = f"{section.where('name')} {given} {flavor} is a model of {custom.text(key)}: --model has to name it"
        return _Model(None, None, (note,))
    if titan is None and name not in NAMES:
        section.refuse("name", f"is not modelled; allowed: {', '.join(NAMES)}; or --model in its place")
    if titan is None:
        allowed = ", ".join(flavors(name))
        section.refuse("flavor", f"not one of {name}'s; allowed: {allowed}; or --model in its place")
    value = section.value("flavor", titan.config) if "flavor" in section else section.default("flavor", titan.config)
    return _Model(value, titan, tuple(_notes_of_model(section, f"{given} {flavor}", family, titan)))


def _replaced(config: TitanConfig, other: Model) -> _Model:
    """Return no model: another one is given. The file's own may be one that only a fork of torchtitan has."""
    section = config.section("model")
    given = section.text("name") or "llama3"
    name = _family(given)[1]
    if name in _REFUSED_WITH_ANY:
        section.refuse("name", f"{_REFUSED[name]}; allowed: {', '.join(NAMES)}")
    shown = one_line(f"{given} {section.text('flavor') or 'debugmodel'}")
    return _Model(None, None, (f"{section.where('name')} {shown}: {other.name} (--model) is estimated in its place",))


def _family(given: str) -> tuple[str, str]:
    """Return the experiment that a name is of ("" if of none), and the plain name."""
    for plain in (given.removeprefix(f"{_SIMPLE_FSDP}."), given.removesuffix(f"_{_SIMPLE_FSDP}")):
        if plain != given:
            return _SIMPLE_FSDP, plain
    return "", _OLD_NAMES.get(given, given)


def _vocabulary(section: Section, name: str, flavor: str) -> int | None:
    """Return the words of the tokenizer if a debug model's vocabulary is the tokenizer's, as until July 2025."""
    path = section.text("tokenizer_path")
    if path is None or name != "llama3" or not flavor.startswith("debugmodel"):
        return None
    return _VOCABULARIES.get(path.rpartition("/")[2])


def _of_hugging_face(config: TitanConfig, flavor: str) -> _Model:
    section = config.section("hf_transformers") if config.has("hf_transformers.model") else config.section("model")
    key = "model" if "model" in section else "name"
    name = section.text(key)
    if key == "name":
        section.refuse("name", "needs [hf_transformers] model; allowed: a Hub id there")
    if flavor != "full":
        config.section("model").refuse("flavor", "replaces the sizes of a Hub model by those of a test; allowed: full")
    return _Model(section.value(key, name), None, ())


def _notes_of_model(section: Section, name: str, family: str, titan: TitanModel) -> list[str]:
    where, kind = section.where("name"), titan.config["model_type"]
    notes = [
        f"{where} {name}: transformers' {kind} of these sizes is estimated, with a unit of FSDP2 for each layer and "
        "one for the rest; torchtitan's modules differ, and since v0.2 its embedding and head are units of their own"
    ]
    if titan.stand_in:
        notes.append(f"{where} {name}: {titan.stand_in}")
    if titan.flex:
        notes.append(f"{where} {name}: FlexAttention and varlen attention over documents are estimated as sdpa")
    if family:
        notes.append(
            f"{where} {name}: {family}'s sharding by torch.compile is not modelled, and fully_shard is assumed"
        )
    return notes


def _sharding(config: TitanConfig, degrees: Degrees) -> _Part:
    """Return the engine and what it reshards."""
    engine = degrees.engine
    options = {"engine": degrees.decides(engine)}
    if engine == "none":
        return _Part(options)
    notes: list[str] = []
    if degrees.pp.value == 1:
        section, key = config.at("training.global_batch_size")
        options["sync_each_micro_batch"] = section.default(key, True)
    if engine == "ddp":
        notes.append(config.note(degrees.replicas, "buckets of 100 MB (bucket_cap_mb) are estimated as torch's 25 MB"))
        return _Part(options, tuple(notes))
    policy = config.choice(
        ("default", "always", "never"),
        "default",
        "parallelism.fsdp_reshard_after_forward",
        "training.fsdp_reshard_after_forward",
    )
    reshards = policy.value == "always" or (policy.value == "default" and degrees.pp.value == 1)
    options["zero"] = policy._replace(value=3 if reshards else 2)
    offload = config.flag("training.enable_cpu_offload")
    if offload.value:
        options |= dict.fromkeys(("offload_params", "offload_optimizer"), offload._replace(value="cpu"))
    return _Part(options, tuple(notes))


def _precision(config: TitanConfig, degrees: Degrees) -> _Part:
    """Return the precision: FSDP's policy, autocast without tensor and pipeline parallelism, else the weights'."""
    dtype = config.choice(_DTYPES, "float32", "training.dtype")
    compute = config.choice(_DTYPES, "bfloat16", "training.mixed_precision_param")
    reduce = config.choice(_DTYPES, "float32", "training.mixed_precision_reduce")
    decides = dtype if dtype.is_given or not compute.is_given else compute
    if dtype.value == "bfloat16":
        if compute.value == "float32" and degrees.has_policy:
            section, key = config.at("training.mixed_precision_param")
            section.refuse(key, "with training.dtype bfloat16 is not modelled; allowed: bfloat16")
        summed = "gradients are reduced in fp32 there (training.mixed_precision_reduce), and estimated in bf16"
        notes = (config.note(dtype, summed),) if degrees.has_policy and reduce.value == "float32" else ()
        return _Part({"precision": decides._replace(value="bf16")}, notes)
    if degrees.has_policy:
        mixed = "bf16-mixed" if compute.value == "bfloat16" else "fp32"
        options = {"precision": decides._replace(value=mixed)}
        if reduce.value == "bfloat16" and mixed == "bf16-mixed":
            options["grad_dtype"] = reduce._replace(value="bf16")
        return _Part(options)
    autocasts = degrees.engine in ("none", "ddp") and compute.value == "bfloat16"
    if autocasts and config.has_old_batch:
        section, key = config.at("training.batch_size")
        old = f"{section.where(key)}: releases with it have no autocast without FSDP, so the weights' fp32 is assumed"
        return _Part({"precision": decides._replace(value="fp32")}, (old,))
    return _Part({"precision": decides._replace(value="bf16-autocast" if autocasts else "fp32")})


def _batch(config: TitanConfig, degrees: Degrees, layers: int | None) -> _Part:
    """Return the batch, and the pipeline that cuts it."""
    local = config.whole(8, "training.local_batch_size", "training.batch_size")
    one = local._replace(value=1)
    options: dict[str, Value] = {}
    notes: list[str] = []
    size, number = local, one
    if degrees.pp.value > 1:
        pipeline = stages(config, degrees.pp.value, layers)
        size, number = batches(config, local, pipeline.number)
        options |= pipeline.options
        notes += pipeline.notes
    options["micro_batch_size"] = size
    whole = config.whole(-1, "training.global_batch_size", least=-(10**10))
    if whole.value == 0:
        config.section("training").refuse("global_batch_size", "allowed: -1, a whole number from 1")
    if whole.value < 0:
        return _Part({**options, ACCUMULATION: number}, tuple(notes))
    options["global_batch_size"] = whole
    ranks = degrees.data_parallel
    if degrees.pp.value > 1 and (ranks is None or whole.value > ranks * local.value):
        each = f"each local batch of {local.value} has a run of the schedule of its own there"
        notes.append(config.note(whole, f"{each}; one run over all micro-batches of a step is estimated"))
    return _Part(options, tuple(notes))


def _recomputation(config: TitanConfig, degrees: Degrees, layers: int | None) -> _Part:
    """Return the activation checkpointing. Raises InputError for a budget, which torch.compile spends."""
    section = config.section("activation_checkpoint")
    mode = config.choice(_MODES, "selective", "activation_checkpoint.mode")
    if mode.value == "memory_budget":
        section.refuse(
            "mode", "torch.compile decides what is kept, which is not modelled; allowed: none, full, selective"
        )
    if mode.value != "selective":
        return _Part({"recompute": mode})
    given = section.raw("selective_ac_option")
    option = "2" if given is None else str(given).strip()
    decides = mode if given is None else section.value("selective_ac_option", option)
    if option == "op" and degrees.ep.value > 1:
        kept = "is not modelled with expert parallelism; no recomputation is counted, which keeps more"
        return _Part({"recompute": decides._replace(value="none")}, (config.note(decides, kept),))
    if option == "op":
        return _Part({"recompute": decides})
    if isinstance(given, bool) or not (option.isascii() and option.isdigit() and len(option) < 8):
        section.refuse("selective_ac_option", "allowed: op, or a whole number (every n-th layer)")
    every = int(option)
    if every < 2:
        return _Part({"recompute": decides._replace(value="full")})
    why = None
    if layers is None:
        why = "needs the number of layers of the model, which the file does not tell"
    elif degrees.pp.value > 1:
        why = "every n-th layer of a pipeline's stages is not modelled"
    if why is not None or layers is None:
        shown = "" if given is not None else "its default 2: "
        section.refuse("selective_ac_option", f"{shown}{why}; allowed: op, 1, or mode none or full")
    recomputed = layers // every
    if recomputed == 0:
        return _Part({"recompute": decides._replace(value="none")})
    options = {"recompute": decides._replace(value="full"), "recompute_layers": decides._replace(value=recomputed)}
    which = f"every {every}nd" if every == 2 else f"every {every}th" if every > 3 else "every 3rd"
    here = f"{section.where('selective_ac_option')} {option}"
    return _Part(
        options, (f"{here}: {which} layer is recomputed there; the first {recomputed} of {layers} are assumed",)
    )


def _optimizer(config: TitanConfig, degrees: Degrees) -> _Part:
    """Return the optimizer, and clipping, which torchtitan always does."""
    name = config.choice(("AdamW", "Adam"), "AdamW", "optimizer.name")
    options = {"optimizer": name._replace(value=name.value.lower())}
    notes: list[str] = []
    fused = config.flag("optimizer.fused", default=not config.has_old_degrees)
    kind = config.choice(("fused", "foreach", "for-loop"), "fused", "optimizer.implementation")
    if not kind.is_given:
        kind = fused._replace(value="fused" if fused.value else "foreach")
    options["optimizer_implementation"] = kind
    section = config.section("training")
    norm: Any = section.raw("max_norm")
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float))):
        section.refuse("max_norm", "allowed: a number")
    early = config.flag("optimizer.early_step_in_backward")
    clips = section.default("max_norm", True) if norm is None else section.value("max_norm", True)
    if early.value:
        notes.append(config.note(early, "a step after backward, with the gradients of all parameters, is assumed"))
    elif degrees.ep.value > 1:
        notes.append(f"{clips.where}: clipping is not modelled with expert parallelism, and left out")
    else:
        options["clip_grad_norm"] = clips
    return _Part(options, tuple(notes))
