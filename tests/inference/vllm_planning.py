"""vLLM's own planning of the KV cache (v1/core/kv_cache_planning.py), run without a GPU.

    python tests/inference/vllm_planning.py FOLDER > tests/inference/vllm_plans.json

FOLDER has the package `vllm` of a wheel, unpacked. The functions that plan and the specs of layers are vLLM's own; stand-ins
take the places of what they import for other purposes (configurations, logging, the registry of kernels, HiSparse).
"""

from __future__ import annotations

import json
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inference.vllm_cases import CASES, Case

_STAND_INS: dict[str, tuple[str, ...]] = {
    "vllm.config": ("SpeculativeConfig", "VllmConfig"),
    "vllm.v1.core.kv_cache_config_builder": ("KVCacheConfigBuilder",),
    "vllm.v1.hisparse.layout": (
        "get_hisparse_host_pool_bytes",
        "get_hisparse_kv_cache_config",
        "get_hisparse_kv_cache_groups",
    ),
    "vllm.v1.attention.backends.registry": ("MambaAttentionBackendEnum",),
}


class _Any:
    def __getattr__(self, _: str) -> _Any:
        return _Any()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return None


def _module(name: str, **content: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(content)
    module.__path__ = []  # type: ignore[attr-defined]
    return module


def _load(folder: Path) -> Any:
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.attention", "vllm.v1.hisparse", "vllm.utils"):
        _module(name).__path__ = [str(folder.joinpath(*name.split(".")))]  # type: ignore[attr-defined]
    for level in ("info_once", "warning_once", "debug_once"):
        setattr(logging.Logger, level, lambda *_, **__: None)
    _module("vllm.logger", init_logger=logging.getLogger)
    _module("vllm.utils.torch_utils", get_dtype_size=lambda dtype: dtype.itemsize)
    _module("vllm.utils.mem_utils", format_gib=lambda n: f"{n / 2**30:.2f}")
    _module("vllm.v1.core.kv_cache_utils", _kv_cache_device_name=lambda _: "GPU")
    _module("vllm.v1.attention.backend", MultipleOf=type("MultipleOf", (), {}))
    for name, names in _STAND_INS.items():
        _module(name, **{one: type(one, (_Any,), {}) if one[0].isupper() else _Any() for one in names})
    sys.modules["vllm.v1.attention.backends.registry"].MambaAttentionBackendEnum = _Any()  # type: ignore[attr-defined]
    _registry()
    import vllm.v1.core.kv_cache_planning as planning  # type: ignore[import-not-found]

    return planning


def _registry() -> None:
    """A registry that says what register_all_kvcache_specs registers: the kind of each class of specs."""

    class Registry:
        @staticmethod
        def get_uniform_type_base_spec(spec: Any) -> Any:
            import vllm.v1.kv_cache_interface as of  # type: ignore[import-not-found]

            return next(c for c in (of.FullAttentionSpec, of.CrossAttentionSpec, type(spec)) if isinstance(spec, c))

    _module("vllm.v1.kv_cache_spec_registry", KVCacheSpecRegistry=Registry)


def _specs(case: Case) -> dict[str, Any]:
    import torch
    import vllm.v1.kv_cache_interface as of

    def spec(kind: str, given: dict[str, Any]) -> Any:
        given = {key: getattr(torch, value) if key == "dtype" else value for key, value in given.items()}
        if kind == "MambaSpec":
            given["shapes"] = tuple(map(tuple, given["shapes"]))
            given["dtypes"] = tuple(getattr(torch, one) for one in given["dtypes"])
        return getattr(of, kind)(**given)

    return {f"layer.{i}": spec(kind, given) for i, (kind, given) in enumerate(case["layers"])}


def planned(folder: Path) -> Iterator[dict[str, Any]]:
    planning = _load(folder)
    from vllm.v1.kv_cache_layout import KVCacheLayout  # type: ignore[import-not-found]

    for case in CASES:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=case.get("encoder", 0),
            ),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda case=case: KVCacheLayout[case["layout"]], num_gpu_blocks_override=None,
                mamba_cache_mode=case["mamba_cache_mode"], prefix_cache_retention_interval=0,
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            model_config=SimpleNamespace(max_model_len=case["max_model_len"], supports_kv_cache_grouping=False),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            max_in_flight_tokens=case["in_flight"], num_prefill_lookahead_tokens=0,
        )  # fmt: skip
        groups = planning.get_kv_cache_groups(config, _specs(case))
        found = planning.get_kv_cache_config_from_groups(config, groups, case["available"])
        blocks = [
            -(-group.kv_cache_spec.max_memory_usage_bytes(config) // group.kv_cache_spec.page_size_bytes)
            for group in groups
        ]
        yield {
            "name": case["name"],
            "groups": [len(group.layer_names) for group in groups],
            "block_sizes": [group.kv_cache_spec.block_size for group in groups],
            "bytes_per_block": planning._get_kv_cache_bytes_per_block(groups, KVCacheLayout[case["layout"]]),
            "num_blocks": found.num_blocks,
            "blocks_per_request": blocks,
            "concurrency": found.num_blocks / sum(blocks),
        }


if __name__ == "__main__":
    print(json.dumps(list(planned(Path(sys.argv[1]))), separators=(",", ":")))
