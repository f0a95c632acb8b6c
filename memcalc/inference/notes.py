"""Notes for the reader of an inference report, one sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inference.quantised_formats import AWQ, MARLIN_GROUPS
from memcalc.quantized.targets import OWN_CLASS

if TYPE_CHECKING:
    from memcalc.inference.report import Inferred
    from memcalc.inference.weights import Method


def _of_quantisation(inferred: Inferred, method: Method) -> list[str]:
    said = "--quantize" if inferred.asked.quantize is not None else "quantization_config"
    experts = any(weight.component == "experts" for weight in inferred.model.weight_classes)
    rule = method.rule.source if experts else method.rule.source.partition("; experts:")[0]
    out = [
        f"{said} {method.name}: the layout of weights is that of {method.format.source}; what is quantised follows {rule}"
    ]
    own = OWN_CLASS.get(inferred.model.model_type)
    if own is not None and not method.rule.subclasses:
        out.append(
            f"{method.name} quantises modules of the class nn.Linear alone, and those of this model are {own}: all stay"
        )
    if experts and not method.rule.experts:
        out.append("transformers keeps stacked experts as they are under this method, which are most of the weights")
    if method.name == "int8":
        out.append(
            "bitsandbytes' int8 products also keep int8 copies of their inputs and 32-bit results, which are not counted"
        )
    return [*out, *method.notes]


_PUBLISHED: Final = {"gpt_oss": ("mxfp4 (experts)", "mxfp4"), "deepseek_v3": ("fp8", "fp8")}
"""The formats in which the best-known checkpoints of a type are published, by their own config.json on the Hub, and the value
of --quantize that has them."""


def _of_the_published(inferred: Inferred) -> list[str]:
    """Return a note for a type whose published checkpoints are quantised, if the configuration does not say it."""
    published = _PUBLISHED.get(inferred.model.model_type)
    if published is None:
        return []
    form, quantize = published
    return [
        f"published checkpoints of a {inferred.model.model_type} are in {form}; this configuration has no "
        f"quantization_config, so weights are counted in {inferred.asked.dtype}: --quantize {quantize} has them as published"
    ]


def _of_length(inferred: Inferred) -> list[str]:
    """Return a note for more tokens than the model was made for, where positions do not end there."""
    asked, most = inferred.asked, inferred.model.program.max_seq_len
    if asked.prompt_len is None or most is None or asked.prompt_len + (asked.new_tokens or 0) <= most:
        return []
    return [
        f"{inferred.model.name} was made for at most {most} tokens; the estimate holds, the model's quality may suffer"
    ]


def _of_engine(inferred: Inferred) -> list[str]:
    engine = inferred.asked.engine
    version = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23"}[engine]
    out = [
        f"rules of {version}; rows, peaks and temporaries are those of transformers' forward without scores of attention and "
        "masks, which the engine's kernels do not write; its other fused kernels are close to it"
    ]
    if inferred.gpu is not None and inferred.asked.attention == "eager":
        out.append(
            "the time of attention is that of transformers' eager attention, which writes scores; the engine's kernels take less"
        )
    if inferred.gpu is None:
        out.append("what the engine reserves depends on the GPU: give --gpu")
    if engine == "vllm":
        out += [*_of_graphs(inferred), *_of_groups(inferred)]
    if engine == "sglang" and inferred.serving is not None:
        out.append(
            "what SGLang leaves free for activations and CUDA graphs is its own rule; whether it is enough only a run tells"
        )
        if inferred.serving.is_tight:
            given, share = inferred.asked.mem_fraction_static, f"{inferred.serving.share:g}"
            asked = f"SGLang's own fraction, {share}," if given is None else f"--mem-fraction-static {share}"
            out.append(
                f"{asked} leaves less free than the parts of its rule add up to, so whether it fits is not known"
            )
    return out


def _of_groups(inferred: Inferred) -> list[str]:
    """Return a note for groups of AWQ that vLLM's Marlin does not take.

    Source: vllm/model_executor/layers/quantization/auto_awq.py, get_quant_method.
    """
    made = None if inferred.method is None else inferred.method.format
    if not isinstance(made, AWQ) or made.group in MARLIN_GROUPS:
        return []
    return [
        f"groups of {made.group}: vLLM's Marlin takes {', '.join(map(str, MARLIN_GROUPS))} alone, so vLLM runs these layers in "
        "its unoptimized AWQ kernels, which are slower; the bytes of weights are the same"
    ]


def _of_graphs(inferred: Inferred) -> list[str]:
    """Return what to know of vLLM's CUDA graphs, whose bytes no rule gives."""
    if inferred.asked.cuda_graph_memory is not None:
        return []
    out = (
        "vLLM measures its CUDA graphs by capturing some, and no rule gives their bytes: only the least is counted, so cache "
        "and sequences are at most these. --cuda-graph-memory takes what its log says, 0 with --enforce-eager"
    )
    return [out]


def _of_states(inferred: Inferred) -> list[str]:
    """Return a note for --kv-dtype beside layers that keep a state instead of keys and values."""
    program, asked = inferred.model.program, inferred.asked
    keeping = sum(bool(program.states(i)) for i in range(program.layers))
    if not keeping:
        return []
    if inferred.kv_cache:
        return [
            f"--kv-dtype {asked.kv_dtype} is that of keys and values; the states of {keeping} layers keep their dtypes"
        ]
    return [
        f"--kv-dtype {asked.kv_dtype} changes nothing: a {inferred.model.model_type} keeps states, and no keys and values"
    ]


def _of_the_run(inferred: Inferred) -> list[str]:
    """Return what to know of a forward that is not the usual one."""
    asked, model_type, out = inferred.asked, inferred.model.model_type, list[str]()
    narrow = [w for w in inferred.model.program.cache_windows().values() if w < (asked.prompt_len or 0)]
    if narrow and inferred.gpu is not None and (asked.engine != "transformers" or asked.attention == "flash"):
        out.append(
            f"the prefill's time of attention is that of all earlier tokens in {len(narrow)} layers that see a window of "
            f"{min(narrow)}: the kernel skips the blocks outside of it, so these layers are faster"
        )
    if asked.cache == "static":
        out.append(
            "steps with a static cache run op by op, as with `generate(disable_compile=True)`; on a GPU `generate` compiles the "
            "decode steps otherwise, and what a compiled step and its CUDA graph keep is not known"
        )
    if model_type == "rwkv" and asked.batch_size > 1 and asked.new_tokens:
        out.append(
            "in decode steps transformers 5.23 mixes the sequences of a batch of rwkv: each has as many tokens as there are "
            "sequences, which is counted"
        )
    if model_type == "dbrx":
        out.append(
            "tokens are shared evenly among the experts of a dbrx; an expert that gets more has larger temporaries"
        )
    return out


def notes(inferred: Inferred) -> list[str]:
    asked, method = inferred.asked, inferred.method
    out = [note for note in inferred.model.notes if not note.startswith("quantization_config")]
    if method is not None:
        out += _of_quantisation(inferred, method)
    if asked.engine != "transformers":
        out += _of_engine(inferred)
    if inferred.model.quantization is None and asked.quantize is None:
        out += _of_the_published(inferred)
    out += _of_length(inferred)
    if asked.zero_inference != "none":
        out.append(
            "ZeRO-Inference is that of one rank, in its second forward or a later one; the model has the dtype of --dtype"
        )
    once = "each new token goes through the model once, and `generate` leaves its last one out"
    out.append(f"prompts of equal length without padding{f'; {once}' if asked.new_tokens else ''}")
    out += _of_the_run(inferred)
    if asked.ep > 1:
        out.append("temporaries are those of a rank whose experts get all tokens: less if they are shared evenly")
    if asked.pp > 1:
        out.append("one batch is in the pipeline; more micro-batches in flight have caches of their own")
    if asked.kv_dtype != "auto":
        out += _of_states(inferred)
        out.append("a kernel reads keys and values in their dtype, as vLLM's do; transformers' own caches make copies")
    return out
