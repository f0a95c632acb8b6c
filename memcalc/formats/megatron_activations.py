"""Megatron-LM's arguments on activations: which modules are recomputed, and which are moved to the host.

Source: core/transformer/transformer_config.py, __post_init__, of Megatron-Core 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.formats.megatron_stages import layers_of
from memcalc.megatron.layout import LEAST, MODULES, OF_EXPERTS, OFFLOADED

if TYPE_CHECKING:
    from memcalc.formats.found import Value
    from memcalc.formats.megatron_section import Arguments


def recomputed(a: Arguments, notes: list[str]) -> dict[str, Value]:
    """Return the recomputation (core/transformer/transformer_config.py, __post_init__)."""
    key = "--recompute-granularity"
    granularity = a.choice(key, ("full", "selective"))
    if a.on("--recompute-activations"):
        granularity, key = "selective", "--recompute-activations"
    for old in ("--checkpoint-activations", "--deepspeed-activation-checkpointing", "--activations-checkpoint-method"):
        if granularity is None and a.given(old):
            a.ignore(old)
            if not a.on("--deepspeed") and old.startswith("--checkpoint"):
                a.reject(old, "is no longer valid in Megatron-LM; allowed: --recompute-granularity")
            return {"recompute": a.value(old, "full")}
    if granularity is None and a.on("--moe-layer-recompute"):
        granularity, key = "selective", "--moe-layer-recompute"
    if granularity == "selective":
        return _selective(a, key, notes)
    if granularity is None:
        return {}
    method = a.choice("--recompute-method", ("uniform", "block"))
    layers = a.whole("--recompute-num-layers", 1)
    if method is None:
        a.reject(key, "Megatron needs --recompute-method with it; allowed: uniform, block")
    if a.on("--distribute-saved-activations"):
        notes.append("--distribute-saved-activations: each tensor-parallel rank is counted with whole saved inputs")
    out = {"recompute": a.value(key, "full")}
    if method == "block" and layers is not None:
        largest = layers_of(a)
        if largest is None or layers < largest:
            out["recompute_layers"] = a.value("--recompute-num-layers", layers)
    elif layers not in (None, 1):
        notes.append(f"{a.shown('--recompute-num-layers')}: every layer is counted as recomputed by itself")
    return out


def _selective(a: Arguments, key: str, notes: list[str]) -> dict[str, Value]:
    """Return the recomputation of modules. Those that the model does not have change nothing."""
    modules = a.names("--recompute-modules") or ("core_attn",)
    for module in modules:
        if module not in MODULES:
            a.refuse("--recompute-modules", f"allowed: {', '.join(MODULES)}")
    if a.on("--moe-layer-recompute") and "moe" not in modules:
        modules = (*modules, "moe")
    there = [module for module in MODULES if module in modules and _has(a, module)]
    if not there:
        return {}
    out = {"recompute": a.value(key, "selective")}
    if there != ["core_attn"]:
        out["recompute_modules"] = a.value("--recompute-modules", ",".join(there))
    return out


def offloaded(a: Arguments, notes: list[str]) -> dict[str, Value]:
    """Return the modules whose saved tensors are moved to the host. Those that the model does not have change nothing."""
    switch, key = "--fine-grained-activation-offloading", "--offload-modules"
    if not a.on(switch):
        return {}
    modules = a.names(key)
    for module in modules:
        if module not in OFFLOADED:
            a.refuse(key, f"allowed: {', '.join(OFFLOADED)}")
    if not modules:
        a.reject(switch, f"Megatron needs --offload-modules with it; allowed: {', '.join(OFFLOADED)}")
    latent, routed = a.on("--multi-latent-attention"), a.given("--num-experts", ("0",))
    if "qkv_linear" in modules and not latent:
        notes.append(f"{key} qkv_linear: what the projection and its norm save is counted on the GPU")
    there = [
        module
        for module in OFFLOADED
        if module in modules
        and (latent or module not in ("attn_norm", "qkv_linear"))
        and (routed or module not in OF_EXPERTS)
    ]
    if a.given("--min-offloaded-tensor-size", (str(LEAST),)):
        a.reject("--min-offloaded-tensor-size", f"another size is not modelled; allowed: {LEAST}, the default")
    return {"offload_modules": a.value(key, ",".join(there))} if there else {}


def _has(a: Arguments, module: str) -> bool:
    """Tell whether the model has a module."""
    if module in ("moe", "moe_act"):
        return a.given("--num-experts", ("0",))
    if module == "shared_experts":
        return a.given("--moe-shared-expert-intermediate-size", ("0",))
    latent = a.on("--multi-latent-attention")
    if module == "layernorm":  # other norms are parts of Transformer Engine's linear layers
        return latent or a.given("--num-experts", ("0",))
    return module != "mla_up_proj" or latent
