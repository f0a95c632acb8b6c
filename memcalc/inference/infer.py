"""`memcalc.infer`: the memory of a model that generates, from its forward of the prompts and of the new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.errors import InputError
from memcalc.inference import encoded
from memcalc.inference.caches import DynamicCache, windows_of
from memcalc.inference.options import DTYPES, Asked, check
from memcalc.inference.parallel import rank_program, stages_of
from memcalc.inference.quantised_formats import MXFP4
from memcalc.inference.quantised_methods import method_of, method_of_config
from memcalc.inference.refusals import refuse_model
from memcalc.inference.report import Inferred, Ran
from memcalc.inference.static_cache import StaticCache
from memcalc.inference.steps import Workload, decode, prefill
from memcalc.inputs.gpu import load_gpu
from memcalc.inputs.model import Model, load_model

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from memcalc.families.base.program import Program
    from memcalc.inference.weights import Method
    from memcalc.inputs.gpu import GPU

DEFAULT_NEW_TOKENS: Final = 128
DEFAULT_PROMPT: Final = 2048


def infer(model: str | os.PathLike[str] | Mapping[str, Any] | Model | None, **options: Any) -> Inferred:
    """Return the report of a model that generates. `options` are those of `memcalc infer`, with underscores.

    Raises InputError if an option is not allowed, or if the model does not generate or its caches are not modelled.
    """
    if model is None:
        raise InputError("--model: needs a model, such as memcalc infer llama-7b")
    loaded, asked = load_model(model), check(options)
    refuse_model(loaded, asked)
    loaded.check_step()
    asked = _with_lengths(loaded, asked)
    gpu = None if asked.gpu is None else load_gpu(asked.gpu)
    inferred = Inferred(loaded, asked, gpu, _ran_by(loaded, asked), method_for(loaded, asked, gpu))
    if asked.engine != "transformers":
        from memcalc.inference.serving.served import check_served

        check_served(inferred)
    return inferred


def _ran_by(model: Model, asked: Asked) -> Ran:
    """Return the steps as the engine runs them."""
    run = ran(model, asked)
    if asked.engine == "transformers":
        return run
    from memcalc.inference.serving.without_scores import without_scores

    return run._replace(prefill=without_scores(run.prefill), decodes=tuple(map(without_scores, run.decodes)))


def method_for(model: Model, asked: Asked, gpu: GPU | None = None) -> Method | None:
    """Return how the weights are quantised: as asked, or as the configuration says. Serving engines quantise experts too, and
    vLLM pads those in MXFP4 for a GPU's kernels."""
    if asked.quantize is None and model.quantization is None:
        if asked.group_size is not None or asked.double_quant:
            return method_of("none", DTYPES[asked.dtype], asked.group_size, double_quant=asked.double_quant)
        return None
    from memcalc.inference.weights import served

    dtype = DTYPES[asked.dtype]
    if asked.quantize is None and asked.zero_inference == "none" and model.quantization is not None:
        method = method_of_config(model.quantization, dtype)
    else:
        method = method_of(asked.quantize or "none", dtype, asked.group_size, double_quant=asked.double_quant)
    if method is None or asked.engine == "transformers":
        return method
    if asked.engine == "vllm" and gpu is not None and isinstance(method.format, MXFP4):
        from memcalc.inference.serving.experts_in_mxfp4 import on

        return on(gpu, method)
    return served(method)


def _with_lengths(model: Model, asked: Asked) -> Asked:
    """Return the options with the defaults of lengths and attention. Raise InputError for more tokens than positions."""
    program = model.program
    new = DEFAULT_NEW_TOKENS if asked.new_tokens is None else asked.new_tokens
    longest = program.max_seq_len or DEFAULT_PROMPT + new
    if asked.new_tokens is None and new >= longest:
        new = longest // 2
    prompt = max(1, min(DEFAULT_PROMPT, longest - new)) if asked.prompt_len is None else asked.prompt_len
    limit = program.positions_limit
    if limit is not None and positions_needed(program, prompt, new) > limit:
        raise InputError(
            f"--prompt-len {prompt}: with {new} new tokens it is more than the {limit} positions of {model.name}; "
            f"allowed: up to {limit} together"
        )
    attention = asked.attention or program.attention_kinds[0]
    if attention not in program.attention_kinds:
        raise InputError(
            f"--attention {attention}: allowed for a {model.model_type}: {', '.join(program.attention_kinds)}"
        )
    return asked._replace(prompt_len=prompt, new_tokens=new, attention=attention)


def positions_needed(program: Any, prompt: int, new: int) -> int:
    """Return the positions that a prompt and its answer need: the larger of both behind an encoder that has the prompt."""
    if program.one_stack or program.decoder_cache.prompted:
        return prompt + new
    return max(prompt, new + 1)


def ran(model: Model, asked: Asked) -> Ran:
    """Run the prefill, and the first and the last decode step, which are the highest: sizes only grow after the first one."""
    program = rank_program(model, asked)
    assert asked.prompt_len is not None and asked.new_tokens is not None and asked.attention is not None
    batch = _batch(asked.batch_size)
    work = Workload(DTYPES[asked.dtype], asked.attention, batch, asked.prompt_len)
    seen = asked.prompt_len + asked.new_tokens
    if not program.one_stack:
        behind: Any = program
        first = encoded.prefill(behind, work)
        start = encoded.decoder_prompt(behind, work)
        before = sorted({start, start + asked.new_tokens - 1}) if asked.new_tokens else []
        steps = tuple(encoded.decode(behind, work, n, first) for n in before)
        return Ran(program, first, steps, tuple(stages_of(model, asked.pp)))
    copying = _with_copies(program, model, asked)
    first = prefill(copying, work, _cache(program, asked))
    one_by_one = program if asked.batch_size == 1 else copying  # a single row has a kernel that makes no copy
    before = sorted({asked.prompt_len, seen - 1}) if asked.new_tokens else []
    steps = tuple(decode(one_by_one, work, _cache(program, asked, n), first.cached) for n in before)
    return Ran(program, first, steps, tuple(stages_of(model, asked.pp)))


def _cache(program: Program, asked: Asked, seen: int = 0) -> DynamicCache:
    """Return transformers' cache after `seen` tokens. A static one has room for the prompt and all new tokens."""
    if asked.cache == "static":
        return StaticCache(program, (asked.prompt_len or 0) + (asked.new_tokens or 0), seen)
    return DynamicCache(*windows_of(program), seen)


def _with_copies(program: Program, model: Model, asked: Asked) -> Program:
    """Return the program with the copies of its weights that bitsandbytes' 4-bit layers make and free again; the program itself
    for all other ways to keep weights, whose kernels read the codes."""
    method = method_for(model, asked)
    if method is None or method.name not in ("nf4", "fp4") or asked.engine != "transformers":
        return program
    from memcalc.inference.quantised_formats import FourBit
    from memcalc.inference.quantised_places import linear_places
    from memcalc.quantized.four_bit import FourBit as Packing
    from memcalc.quantized.program import with_quantized_weights

    dtype = DTYPES[asked.dtype]
    nested = isinstance(method.format, FourBit) and method.format.nested
    return with_quantized_weights(
        program, Packing(nested, dtype, dtype), linear_places(model, method.rule, method.left_out)
    )


def _batch(size: int) -> Dim:
    """Return the batch as a polynomial: a run answers for other batches too. A batch of one takes branches of its own."""
    return Dim("batch", size, (0, 0, 0, 1, 0, 0))
