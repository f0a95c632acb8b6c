"""SGLang's own rule for `mem_fraction_static` (arg_groups/memory_hook.py), run without a GPU.

    python tests/inference/sglang_rules.py FOLDER > tests/inference/sglang_fractions.json

FOLDER has the package `sglang` of a wheel, unpacked. The module that decides is SGLang's own, with that of the captured sizes;
stand-ins take the places of the modules that these import.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MIB = (15360, 23028, 24564, 32607, 40960, 46068, 81008, 81920, 144384, 183359)
CASES = [(mib, tp, pp, latent) for mib in MIB for tp in (1, 2, 4, 8) for pp in (1, 2) for latent in (False, True)]
_USED = {
    "overrides": ("declare_resolution", "model_config_of", "post_capture_kv_sizing_planned", "resolved_view", "resolving_view",
                  "use_mla_backend", "attention_backends_of"),
}  # fmt: skip


def _module(name: str, **content: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(content)
    module.__path__ = []  # type: ignore[attr-defined]
    return module


def _loaded(name: str, place: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load(folder: Path) -> tuple[Any, SimpleNamespace]:
    of = SimpleNamespace(mib=0.0, latent=False)
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.model_executor", "sglang.srt.utils"):
        _module(name)
    _module(
        "sglang.srt.arg_groups.overrides",
        declare_resolution=lambda args, _, **given: vars(args).update(given), resolved_view=lambda args: args,
        resolving_view=lambda args: args, post_capture_kv_sizing_planned=lambda _: False, use_mla_backend=lambda _: of.latent,
        model_config_of=lambda _: SimpleNamespace(is_multimodal=False), attention_backends_of=lambda _: (None, None),
    )  # fmt: skip
    _module("sglang.srt.environ", envs=SimpleNamespace())
    _module(
        "sglang.srt.runtime_context",
        attn_dp_enabled_of=lambda _: False,
        get_platform=lambda: SimpleNamespace(is_xpu=False),
    )
    _module(
        "sglang.srt.utils.common",
        get_device_memory_capacity=lambda _: of.mib,
        parse_connector_type=None,
        is_cuda=lambda: True,
    )
    _module("sglang.srt.connector", ConnectorType=None)
    _module("sglang.srt.model_executor.cuda_graph_config", ALLOWED_BACKENDS_PER_PHASE=None, CudaGraphConfig=None,
            default_cuda_graph_config=None, with_phase=None, Backend=SimpleNamespace(BREAKABLE="breakable", DISABLED="disabled",
            FULL="full"), Phase=SimpleNamespace(PREFILL="prefill", DECODE="decode"))  # fmt: skip
    for name in ("sglang.srt.arg_groups.model_overrides", "sglang.srt.arg_groups.model_overrides.qwen3_vl"):
        _module(name, expand_multimodal_decode_graph_to_running_limit=lambda *_: None)
    groups = folder / "sglang" / "srt" / "arg_groups"
    _loaded("sglang.srt.arg_groups.cuda_graph_hook", groups / "cuda_graph_hook.py")
    return _loaded("sglang.srt.arg_groups.memory_hook", groups / "memory_hook.py"), of


def fractions(folder: Path) -> Iterator[dict[str, Any]]:
    hook, of = _load(folder)
    for mib, tp, pp, latent in CASES:
        of.mib, of.latent = mib, latent
        phase = SimpleNamespace(max_bs=None, bs=None, backend="full")
        prefill = SimpleNamespace(max_bs=None, bs=None, backend="breakable" if pp == 1 else "disabled")
        args = SimpleNamespace(
            device="cuda", cuda_graph_config=SimpleNamespace(decode=phase, prefill=prefill), chunked_prefill_size=None,
            tp_size=tp, pp_size=pp, max_running_requests=None, disable_cuda_graph_padding=False, speculative_algorithm=None,
            max_total_tokens=None, model_path="model", mem_fraction_static=None, language_only=False, language_model_only=False,
            disaggregation_mode="null", enable_symm_mem=False, moe_a2a_backend="none", attn_dp_size=1,
            _cuda_graph_config_locked=set(), max_prefill_tokens=16384, speculative_num_draft_tokens=None,
        )  # fmt: skip
        hook.handle_gpu_memory_settings(args)
        yield {
            "mib": mib, "tp": tp, "pp": pp, "latent": latent, "prefill": args.chunked_prefill_size,
            "decode": args.cuda_graph_config.decode.max_bs, "fraction": args.mem_fraction_static,
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(list(fractions(Path(sys.argv[1]))), separators=(",", ":")))
