"""The questions that `memcalc infer` does not answer, refused in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError

if TYPE_CHECKING:
    from memcalc.inference.options import Asked
    from memcalc.inputs.model import Model


_OF_ENGINES: Final = {
    "block_size": ("vllm", "sglang"),
    "gpu_memory_utilization": ("vllm",),
    "mem_fraction_static": ("sglang",),
    "cuda_graph_memory": ("vllm",),
}
"""The options that only some engines have."""


def _refuse_around_zero_inference(asked: Asked) -> None:
    """Raise InputError for options that stand beside ZeRO-Inference and are not modelled with it."""
    for name, value, allowed in (
        ("engine", asked.engine, "transformers"), ("tp", asked.tp, 1), ("pp", asked.pp, 1), ("ep", asked.ep, 1),
        ("quantize", asked.quantize or "none", "none"), ("cache", asked.cache, "dynamic"),
    ):  # fmt: skip
        if value != allowed:
            raise InputError(
                f"--{name} {value}: not modelled with --zero-inference {asked.zero_inference}; allowed: {allowed}"
            )


def refuse_model(model: Model, asked: Asked) -> None:
    """Raise InputError for a model without a cache, or one that has no program on paper."""
    program = model.program
    if program.source:
        raise InputError(
            f"--model {model.name}: a {model.model_type} has no program here, and its cache is not known; "
            "allowed: a type that `memcalc models` lists"
        )
    if model.support.only_engine is not None:
        raise InputError(f"--model {model.name}: a {model.model_type} is trained by {model.support.only_engine} alone")
    if model.model_type == "layers":
        raise InputError(
            "--layers: a network listed by layer does not generate, so it has no cache to size; allowed: --model"
        )
    if program.cacheless is not None:
        raise InputError(f"--model {model.name}: a {model.model_type} {program.cacheless}, so it has no cache to size")
    for name, engines in _OF_ENGINES.items():
        if getattr(asked, name) is not None and asked.engine not in engines:
            option, which = "--" + name.replace("_", "-"), " or ".join(engines)
            raise InputError(
                f"{option} {getattr(asked, name)}: not an option of {asked.engine}; allowed: with --engine {which}"
            )
    if asked.engine != "transformers" and asked.cache != "dynamic":
        raise InputError(f"--cache {asked.cache}: is one of transformers' caches; allowed: with --engine transformers")
    if asked.zero_inference != "none":
        _refuse_around_zero_inference(asked)
    if asked.cache == "static":
        _refuse_static(model)
    if asked.quantize == "mxfp4" and model.model_type != "gpt_oss":
        raise InputError(
            f"--quantize mxfp4: transformers quantises the experts of a gpt_oss alone, and {model.name} is a "
            f"{model.model_type}; allowed: none, fp8, int8, nf4, fp4, int4, gptq, awq"
        )
    if asked.prompt_len == 1 and program.shortest_prompt > 1:
        raise InputError(
            f"--prompt-len 1: fails in transformers with a {model.model_type} whose lru_width is not its hidden_size; "
            "allowed: 2 or more"
        )


def _refuse_static(model: Model) -> None:
    """Raise InputError for a model that takes no StaticCache, or whose steps with one are not modelled."""
    if not model.program.one_stack:
        raise InputError(f"--cache static: not modelled for a {model.model_type}; allowed: dynamic")
    if model.program.no_static_cache is not None:
        raise InputError(f"--cache static: a {model.model_type} {model.program.no_static_cache}; allowed: dynamic")
