"""`memcalc infer`: the memory of a model that generates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from memcalc.cli import options as o

if TYPE_CHECKING:
    from memcalc.inference.report import Inferred

EPILOG = """Examples:

memcalc infer llama-7b --batch-size 8 --prompt-len 2k --new-tokens 512

memcalc infer llama-3-8b --prompt-len 8k --gpu a100-40gb

memcalc infer llama-2-70b --tp 8 --gpu h100-80gb --batch-size 32 --json

memcalc infer deepseek-v3 --tp 8 --ep 8 --kv-dtype fp8 --prompt-len 4k

memcalc infer gemma-3-1b --prompt-len 8k --rows

memcalc infer llama-3-70b --engine vllm --tp 4 --quantize fp8 --gpu h100-80gb --prompt-len 8k

memcalc infer llama-2-70b --zero-inference cpu --gpu a100-80gb

memcalc infer llama-7b --dtype-table
"""

_RUN = "Model and run"
_PARALLEL = "GPUs"
_SERVING = "Serving"
_OUTPUT = "Output"


def infer(
    name: o.Name = None,
    model: o.Model = None,
    batch_size: Annotated[
        int | None, o.option("Sequences that run together. (default: 1)", _RUN, "--batch-size", "-b")
    ] = None,
    prompt_len: Annotated[
        str | None,
        o.option(
            "Tokens of each prompt, also 4k. (default: 2048, or what the model has room for)", _RUN, "--prompt-len"
        ),
    ] = None,
    new_tokens: Annotated[
        str | None, o.option("Tokens that each sequence gets, also 1k. (default: 128)", _RUN, "--new-tokens")
    ] = None,
    dtype: Annotated[
        str | None, o.option("bf16 (default), fp16, fp32: weights and activations.", _RUN, "--dtype")
    ] = None,
    quantize: Annotated[
        str | None,
        o.option(
            "none, fp8, int8, nf4, fp4, int4, gptq, awq, mxfp4: weights in fewer bits. (default: as the configuration says)",
            _RUN,
            "--quantize",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        o.option("Inputs that share a scale: 16 to 1024 (default: 128), -1; int4, gptq, awq.", _RUN, "--group-size"),
    ] = None,
    double_quant: Annotated[
        bool | None, o.option("The scales of nf4 and fp4 are quantised too.", _RUN, "--double-quant/--no-double-quant")
    ] = None,
    kv_dtype: Annotated[
        str | None,
        o.option(
            "auto (default: as --dtype), fp8, fp8_e5m2, int8, bf16, ...: keys and values in the cache.",
            _RUN,
            "--kv-dtype",
        ),
    ] = None,
    cache: Annotated[
        str | None, o.option("dynamic (default), static: transformers' cache classes.", _RUN, "--cache")
    ] = None,
    attention: Annotated[str | None, o.option("sdpa, eager. (default: as transformers)", _RUN, "--attention")] = None,
    tp: Annotated[int | None, o.option("Tensor parallel degree. (default: 1)", _PARALLEL, "--tp")] = None,
    pp: Annotated[int | None, o.option("Pipeline parallel degree. (default: 1)", _PARALLEL, "--pp")] = None,
    ep: Annotated[int | None, o.option("Ranks that share the experts. (default: 1)", _PARALLEL, "--ep")] = None,
    gpu: Annotated[
        str | None,
        o.option("Does it fit, and how many sequences do? A name of `memcalc gpus`, 80GB, auto.", _PARALLEL, "--gpu"),
    ] = None,
    engine: Annotated[
        str | None, o.option("transformers (default), vllm, sglang: whose caches and reserves.", _SERVING, "--engine")
    ] = None,
    block_size: Annotated[
        int | None,
        o.option("Tokens of a block (vLLM: 16, or 64 of latents) or a page (SGLang: 1).", _SERVING, "--block-size"),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        o.option("Share of the GPU that vLLM takes. (default: 0.92)", _SERVING, "--gpu-memory-utilization"),
    ] = None,
    mem_fraction_static: Annotated[
        float | None,
        o.option("Share for weights and cache in SGLang. (default: by its rule)", _SERVING, "--mem-fraction-static"),
    ] = None,
    cuda_graph_memory: Annotated[
        str | None,
        o.option(
            "What vLLM's log says of its CUDA graphs (1.2GiB); 0 with --enforce-eager. (default: not known)",
            _SERVING,
            "--cuda-graph-memory",
        ),
    ] = None,
    zero_inference: Annotated[
        str | None,
        o.option(
            "none (default), cpu, nvme: DeepSpeed's ZeRO-3 with weights off the GPU.", _SERVING, "--zero-inference"
        ),
    ] = None,
    dtype_table: Annotated[
        bool,
        typer.Option(
            "--dtype-table",
            help="Instead: the weights in every dtype, as `accelerate estimate-memory` has them and exactly.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if it does not fit --gpu.", rich_help_panel=_OUTPUT)
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every row with its formula.", rich_help_panel=_OUTPUT)] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel=_OUTPUT)] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to a file; .json is a document.", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """Tell what a model needs per GPU while it generates: weights, caches, the peaks of prefill and decode."""
    from memcalc.cli.output import answering, choose_format, written
    from memcalc.errors import InputError
    from memcalc.inference.infer import infer as run

    kind = choose_format(json, None, output)
    if kind not in ("table", "json"):
        raise InputError(f"--output {output}: allowed: a name that ends with .json or .txt")
    if dtype_table:
        _refuse_beside_table(
            batch_size=batch_size, prompt_len=prompt_len, new_tokens=new_tokens, dtype=dtype, quantize=quantize,
            group_size=group_size, double_quant=double_quant, kv_dtype=kv_dtype, cache=cache, attention=attention, tp=tp,
            pp=pp, ep=ep, gpu=gpu, engine=engine, block_size=block_size, gpu_memory_utilization=gpu_memory_utilization,
            mem_fraction_static=mem_fraction_static, cuda_graph_memory=cuda_graph_memory, zero_inference=zero_inference,
            check=check or None, rows=rows or None,
        )  # fmt: skip
        _dtypes(o.model_of(name, model), kind, output)
        return
    if check and gpu is None:
        raise InputError("--check: needs --gpu, such as --gpu a100-80gb")
    report = run(
        o.model_of(name, model), batch_size=batch_size, prompt_len=None if prompt_len is None else o.tokens(prompt_len),
        new_tokens=None if new_tokens is None else o.tokens(new_tokens), dtype=dtype, quantize=quantize, kv_dtype=kv_dtype,
        cache=cache, attention=attention, tp=tp, pp=pp, ep=ep, gpu=gpu, block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization, group_size=group_size, double_quant=double_quant, engine=engine,
        mem_fraction_static=mem_fraction_static, zero_inference=zero_inference, cuda_graph_memory=cuda_graph_memory,
    )  # fmt: skip
    if check and report.fits is None:
        raise InputError(
            "--check: what CUDA graphs or compiled steps keep is not known, so it cannot be shown to fit; allowed: --cache "
            "dynamic; with vLLM --cuda-graph-memory from its log (0 with --enforce-eager); SGLang's own fraction"
        )
    status = 1 if check and report.fits is False else 0
    with answering(status):
        if output is None or str(output) == "-":
            _write(report, kind, rows, sys.stdout)
        else:
            with written("--output", output) as file:
                _write(report, kind, rows, file)
    if status:
        raise typer.Exit(status)


def _refuse_beside_table(**given: object) -> None:
    """Raise InputError for an option that changes nothing in the table of dtypes."""
    from memcalc.errors import InputError

    for name, value in given.items():
        if value is not None:
            raise InputError(f"--{name.replace('_', '-')}: changes nothing in --dtype-table; allowed: without it")


def _dtypes(source: str | None, kind: str, output: Path | None) -> None:
    from memcalc.cli.output import answering, written
    from memcalc.errors import InputError
    from memcalc.inference.dtype_table import dtype_table
    from memcalc.inputs.model import load_model
    from memcalc.report.served_lines import dtype_document, print_dtypes

    if source is None:
        raise InputError("--model: needs a model, such as memcalc infer llama-7b --dtype-table")
    model = load_model(source)
    lines = dtype_table(model)

    def write(file: IO[str]) -> None:
        if kind == "json":
            import json as library

            file.write(library.dumps(dtype_document(model, lines), indent=1) + "\n")
        else:
            print_dtypes(model, lines, file=file)

    with answering(0):
        if output is None or str(output) == "-":
            write(sys.stdout)
        else:
            with written("--output", output) as file:
                write(file)


def _write(report: Inferred, kind: str, rows: bool, file: IO[str]) -> None:
    if kind == "json":
        import json as library

        file.write(library.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
        return
    from memcalc.report.inference_table import print_inferred

    print_inferred(report, file=file, rows=rows)
