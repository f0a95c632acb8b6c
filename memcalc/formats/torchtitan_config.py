"""torchtitan's TOML as its JobConfig reads it: the keys of all releases up to v0.2.2, and where each was.

Source: torchtitan/config/job_config.py and manager.py of v0.2.2, torchtitan/config_manager.py of v0.1.0 and before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from memcalc.errors import InputError, nearest, one_line, quoted
from memcalc.formats.found import Value
from memcalc.formats.section import Section

OPTION: Final = "--torchtitan"
_FLOAT8: Final = (
    "emulate enable_fsdp_float8_all_gather filter_fqns precompute_float8_dynamic_scale_for_fsdp recipe_name"
)
_MX: Final = "filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name"
_DATALOADER: Final = "num_workers persistent_workers pin_memory prefetch_factor"
_KEYS: Final[Mapping[str, str]] = {
    "activation_checkpoint": "debug determinism_check early_stop memory_budget mode preserve_rng_state "
    "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns visualize_memory_budget_pareto",
    "checkpoint": "async_mode create_seed_checkpoint enable enable_checkpoint enable_first_step_checkpoint "
    "enable_ft_dataloader_checkpoints exclude_from_loading export_dtype folder initial_load_in_hf "
    "initial_load_in_hf_quantized initial_load_model_only initial_load_model_weights_only initial_load_path interval "
    "interval_type keep_latest_k last_save_in_hf last_save_in_safetensors_format last_save_model_only "
    "last_save_model_weights_only load_only load_step model_weights_only",
    "comm": "init_timeout_seconds mode save_traces_file_prefix save_traces_folder timeout_seconds trace_buf_size "
    "train_timeout_seconds",
    "compile": "backend components enable",
    "debug": "deterministic deterministic_warn_only moe_force_load_balance seed",
    "estimate": "memory mode",
    "experimental": "context_parallel_degree context_parallel_rotate_method custom_args_module custom_import "
    "custom_model_path enable_async_tensor_parallel enable_compiled_autograd pipeline_parallel_degree "
    "pipeline_parallel_microbatches pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_split_mode pipeline_parallel_split_points torch_spmd",
    "fault_tolerance": "enable fragment_sync_delay fragment_update_alpha group_size min_replica_size "
    "module_fqns_per_model_fragment num_fragments process_group process_group_timeout_ms replica_id semi_sync_method "
    "should_quantize sync_steps",
    "float8": f"{_FLOAT8} enable_float8_linear force_recompute_fp8_weight_in_bwd moe_fqns_prototype "
    "scaling_type_grad_output scaling_type_input scaling_type_weight",
    "hf_transformers": "model",  # of the experiment with transformers' own modules
    "job": "config_file custom_config_module description dump_folder print_args print_config save_config_file "
    "save_config_folder use_for_integration_test",
    "lr_scheduler": "decay_ratio decay_type lr_min min_lr_factor total_steps warmup_steps",
    "memory_estimation": "disable_fake_mode enable enabled",
    "metrics": "disable_color_printing disable_logging_from_checkpoint enable_color_printing enable_tensorboard "
    "enable_wandb log_freq rank_0_only save_for_all_ranks save_tb_folder",
    "model": "attn_mask_type converters flavor hf_assets_path name norm_type print_after_conversion tokenizer_path "
    "use_flex_attn",
    "mx": f"{_MX} moe_fqns_prototype use_fp8_dim1_cast_triton_kernel",
    "optimizer": "beta1 beta2 early_step_in_backward eps fused implementation lr name weight_decay",
    "parallelism": "context_parallel_degree context_parallel_load_balancer context_parallel_rotate_method "
    "data_parallel_replicate_degree data_parallel_shard_degree disable_loss_parallel enable_async_tensor_parallel "
    "enable_compiled_autograd expert_parallel_comm_backend expert_parallel_degree expert_tensor_parallel_degree "
    "fsdp_reshard_after_forward module_fqns_per_model_part pipeline_parallel_degree "
    "pipeline_parallel_expert_parallel_overlap pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_microbatch_size "
    "pipeline_parallel_microbatches pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_split_points tensor_parallel_degree",
    "profiling": "enable_memory_snapshot enable_profiling profile_every_x_iter profile_freq profiler_active "
    "profiler_warmup run_profiler save_memory_snapshot_folder save_traces_folder",
    "quantize": "dense grouped_mm linear moe",
    "quantize.dense": "float8 mx",
    "quantize.dense.float8": _FLOAT8,
    "quantize.dense.mx": _MX,
    "quantize.grouped_mm": "float8 mx",
    "quantize.grouped_mm.float8": "fqns",
    "quantize.grouped_mm.mx": "fqns recipe_name",
    "quantize.linear": "float8 mx",
    "quantize.linear.float8": _FLOAT8,
    "quantize.linear.mx": _MX,
    "quantize.moe": "float8 mx",
    "quantize.moe.float8": "fqns",
    "quantize.moe.mx": "fqns",
    "training": "batch_size checkpoint_folder checkpoint_interval checkpoint_interval_type compile "
    "data_parallel_degree data_parallel_replicate_degree data_parallel_shard_degree data_parallel_type dataloader "
    "dataset dataset_path debug_moe_force_load_balance deterministic disable_loss_parallel dtype enable_cpu_offload "
    "enable_float8_linear enable_fp8_linear enable_fsdp_float8_all_gather enable_fsdp_fp8_all_gather "
    "enable_loss_parallel enable_selective_ac float8_scaling_type_grad_output float8_scaling_type_input "
    "float8_scaling_type_weight fp8_linear fsdp_reshard_after_forward gc_debug gc_freq global_batch_size "
    "local_batch_size max_norm mixed_precision_param mixed_precision_reduce pipeline_parallel_degree "
    "precompute_float8_dynamic_scale_for_fsdp seed seq_len sequence_parallel_degree steps tensor_parallel_degree "
    "warmup_pct warmup_steps",
    "training.dataloader": _DATALOADER,
    "validation": "dataloader dataset dataset_path enable enabled freq local_batch_size seq_len steps",
    "validation.dataloader": _DATALOADER,
}
"""The keys of each section, those of all releases together."""
_OLD_DEGREES: Final = (
    *(f"training.{axis}_parallel_degree" for axis in ("data", "tensor", "sequence", "pipeline")),
    "training.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree",
    "experimental.pipeline_parallel_degree",
    "experimental.context_parallel_degree",
)
_MOST_NAMED: Final = 6
_MISSPELT: Final = 0.8
"""Keys that are so much alike are taken for one (difflib's ratio)."""


class TitanConfig:
    """The sections of a file. A value is asked for by all the places that releases had it at, the newest first."""

    def __init__(self, file: str, content: Mapping[str, Any]) -> None:
        """Read `content`, which is `file`'s ("" if it is none). Raises InputError for a section that is none."""
        self.top = Section(OPTION, file, content)
        self._sections = {name: self.top.section(name) for name in _KEYS if "." not in name}

    def section(self, name: str) -> Section:
        """Return a section at the top; an empty one if the file has none."""
        return self._sections.get(name) or self.top.section(name)

    def at(self, *paths: str) -> tuple[Section, str]:
        """Return the section and the key of the first of these places that the file has; of the first of all if it has
        none."""
        places = [(self.section(path.partition(".")[0]), path.partition(".")[2]) for path in paths]
        return next(((section, key) for section, key in places if key in section), places[0])

    def has(self, *paths: str) -> bool:
        """Tell whether the file has a value at one of these places."""
        section, key = self.at(*paths)
        return key in section

    def whole(self, default: int, *paths: str, least: int = 1) -> Value:
        """Return a whole number. Raises InputError for another value."""
        section, key = self.at(*paths)
        return _value(section, key, section.whole(key, least, 10**10), default)

    def flag(self, *paths: str, default: bool = False) -> Value:
        """Return a switch. Raises InputError for another value."""
        section, key = self.at(*paths)
        return _value(section, key, section.flag(key), default)

    def choice(self, allowed: Collection[str], default: str, *paths: str) -> Value:
        """Return one of some names. Raises InputError for another value."""
        section, key = self.at(*paths)
        return _value(section, key, section.choice(key, allowed), default)

    def note(self, value: Value, what: str) -> str:
        """Return a sentence on a value that is not modelled as it is."""
        shown = str(value.value).lower() if isinstance(value.value, bool) else one_line(value.value)
        return f"{value.where} {shown}: {what}"

    @property
    def has_old_degrees(self) -> bool:
        """Tell whether the file is from before March 2025, when degrees came into [parallelism]."""
        return self.has(*_OLD_DEGREES)

    @property
    def has_old_batch(self) -> bool:
        """Tell whether the file is from before June 2025, when [training] batch_size became local_batch_size."""
        return self.has_old_degrees or (self.has("training.batch_size") and not self.has("training.local_batch_size"))

    @property
    def own_keys_of(self) -> str | None:
        """Return the module that adds keys to torchtitan's; None if there is none."""
        for section, key in (self.at("job.custom_config_module"), self.at("experimental.custom_args_module")):
            name = section.text(key)
            if name:
                return name
        return None

    def unknown_keys(self) -> list[str]:
        """Return the keys that no release has. Raises InputError for one that looks like a key that matters.

        v0.2 refuses them all (`_dict_to_dataclass` in manager.py), older releases pass over them, and forks add some.
        """
        unknown = list(self._unknown(self.top, "", {name for name in _KEYS if "." not in name}))
        if self.own_keys_of is None:
            for path, known in unknown:
                close = nearest(path.rpartition(".")[2], known, most=1, cutoff=_MISSPELT)
                if close or path.startswith("model."):
                    hint = f"; did you mean {close[0]}?" if close else ""
                    place = f"{OPTION} {self.top.file}: " if self.top.file else f"{OPTION}: "
                    raise InputError(f"{place}{quoted(path)[1:-1]}: unknown key{hint}")
        return [path for path, _ in unknown]

    def _unknown(self, section: Section, path: str, known: Collection[str]) -> list[tuple[str, Collection[str]]]:
        out: list[tuple[str, Collection[str]]] = []
        for key in section.content:
            inner = f"{path}{key}"
            if key not in known:
                out.append((inner, known))
            elif inner in _KEYS:
                below = self.section(key) if not path else section.section(key)
                out += self._unknown(below, f"{inner}.", _KEYS[inner].split())
        return out


def named(keys: list[str]) -> str:
    """Return some keys as text, the rest of many as a number."""
    shown = ", ".join(one_line(key, 60) for key in keys[:_MOST_NAMED])
    return shown if len(keys) <= _MOST_NAMED else f"{shown} and {len(keys) - _MOST_NAMED} more"


def _value(section: Section, key: str, value: Any, default: Any) -> Value:
    return section.default(key, default) if value is None else section.value(key, value)
