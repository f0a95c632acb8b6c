"""`memcalc validate`: run a setup, and print prediction and measurement side by side."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from memcalc.cli import options as o
from memcalc.cli.setup_options import takes_setup

EPILOG = """Examples:
memcalc validate --model gpt2 --precision bf16 -b 2 -s 512
memcalc validate --model llama-7b --engine fsdp2 --zero 3 --gpus 8
memcalc validate --model llama-7b --backend cuda --precision bf16 --recompute full
memcalc validate --suite quick
memcalc validate --suite gpu --backend cuda --record measured.json
"""

_PANEL = "Measurement"


@takes_setup
def validate(
    name: o.Name = None,
    model: o.Model = None,
    backend: Annotated[
        str,
        typer.Option("--backend", help="fake (no GPU: sizes without data) or cuda.", rich_help_panel=_PANEL),
    ] = "fake",
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help='Instead of --model: quick, gpu, or a JSON file {"cases": [...]}.',
            rich_help_panel=_PANEL,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="With --suite: write results to this file. Cases that are in it are not run again.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel=_PANEL)] = False,
    **setup: Any,
) -> None:
    """Run the estimated step (transformers, torch, the engine) and print prediction and measurement side by side."""
    from memcalc.errors import InputError, one_line
    from memcalc.inputs.file_options import FILES
    from memcalc.pipelining.schedules import NAMES
    from memcalc.tasks import ONLINE
    from memcalc.validate import recording, run, suites

    model = o.model_of(name, model)
    given = o.setup_of(setup)
    if "layers" in given:
        raise InputError("--layers: validate runs models of transformers; allowed: --model")
    _check_compression(given)
    if given.get("quantize") == "int8":
        raise InputError("--quantize int8: validate does not run it yet; allowed: none, nf4, fp4")
    for option in _NOT_RUN:
        if given.get(option) not in (None, False, "none"):
            _refuse_to_run(option)
    has_file = any(name in given for name in FILES)
    if (model is None) == (suite is None) and not (suite is None and has_file):
        raise InputError("--model or --suite: exactly one of them is needed")
    if record is not None and not str(record):  # an empty word is not converted to a path
        raise InputError("--record '': allowed: the name of a file")
    if suite == "":
        raise InputError("--suite '': allowed: the name of a file")
    if suite is None and record is not None:
        raise InputError("--record: needs --suite; allowed: --json, which prints the record of one case")
    if given.get("schedule") in NAMES:
        why = "is not run by validate; allowed: gpipe, 1f1b, interleaved, zero-bubble"
        raise InputError(f"--schedule {given['schedule']}: {why}")
    speaks = os.environ.get("RANK", "0") == "0"  # only the first of the ranks that torchrun starts
    if suite is not None:
        if given:
            raise InputError(
                f"--{next(iter(given)).replace('_', '-')}: contradicts --suite, whose cases have options; leave it out"
            )
        cases = suites.read_suite(suite)
        made = recording.run_suite(cases, backend, record, lambda line: print(line, file=sys.stderr), speaks=speaks)
        document: dict[str, Any] = {"schema_version": 1, "cases": made}
    else:
        _refuse_what_is_not_run(model, given)
        if given.get("task") in ONLINE:
            raise InputError(f"--task {given['task']}: is not run by this version; allowed: pretrain, sft, dpo, kto")
        try:
            comparison = run.validate(model, backend=backend, **given)
        except InputError:
            raise
        except Exception as error:  # raised by torch, transformers or the engine
            if run.is_out_of_memory(error):
                raise InputError(f"--backend {backend}: out of memory; allowed: a smaller setup") from None
            why = f"{type(error).__name__}: {one_line(error, 300)}"
            where = run.place_of(error)
            raise InputError(f"--backend {backend}: the run failed ({why}) at {where}") from error
        for option in _NOT_RUN:  # of a file
            if getattr(comparison.report.setup, option) not in (None, False, "none"):
                _refuse_to_run(option)
        if not json and speaks:
            from memcalc.report.comparison import print_comparison

            print_comparison(comparison, sys.stdout)
        document = comparison.to_dict()
    if json and speaks:
        import json as library

        print(library.dumps(document, indent=1, ensure_ascii=False))


def _refuse_what_is_not_run(model: str | None, given: dict[str, Any]) -> None:
    """Raise InputError for parts of ZeRO++, whose quantiser has no version for the CPU and which no run asks DeepSpeed for,
    for weights on the host, for codes in another dtype than bitsandbytes' own or in shards, for frozen weights and adapters on
    axes where the run does not put them, and for the stages of an encoder and a decoder."""
    from memcalc import estimate
    from memcalc.inputs.file_options import FILES
    from memcalc.inputs.options import NOT_YET, PLUS_PLUS, refuse

    asked = (*PLUS_PLUS, "offload_params", "quantize", "freeze", "lora_rank", "pp", *FILES)
    if not any(name in given for name in asked):
        return
    report = estimate(model, **given)
    setup = report.setup
    if setup.pp > 1 and not report.model.program.one_stack:
        refuse("pp", setup.pp, f"for a {report.model.model_type} in a run {NOT_YET}1; memcalc estimate takes it")
    shards = setup.engine == "fsdp2" or (setup.engine == "deepspeed" and setup.zero == 3)
    if setup.quantize_storage is not None and (shards or setup.quantize_storage != "uint8"):
        how = f"with codes in {setup.quantize_storage} and engine {setup.engine}"
        refuse("quantize", setup.quantize, f"{how}, in a run {NOT_YET}none; memcalc estimate takes it")
    if setup.offload_params != "none":
        refuse("offload_params", setup.offload_params, f"in a run {NOT_YET}none; memcalc estimate takes it")
    why = "where the run freezes or adapts a model before it is cut,"
    if setup.lora_rank and setup.tp > 1:
        refuse("lora_rank", setup.lora_rank, f"with --tp {setup.tp}, {why} {NOT_YET}0; memcalc estimate takes it")
    if setup.freeze is not None and (setup.pp > 1 or setup.sequence_parallel):
        axis = f"--pp {setup.pp}" if setup.pp > 1 else "--sequence-parallel"
        refuse("freeze", setup.freeze, f"with {axis}, {why} {NOT_YET}leave it out; memcalc estimate takes it")
    for name, off in PLUS_PLUS.items():
        if getattr(setup, name) != off:
            shown = "off" if off is False else off
            refuse(name, getattr(setup, name), f"in a run {NOT_YET}{shown}; memcalc estimate takes it")


def _check_compression(given: dict[str, Any]) -> None:
    """Raise InputError for compressed communication, which is not run."""
    from memcalc.errors import InputError
    from memcalc.registry import OF_DEEPSPEED

    why = "is not run by validate; allowed: without it, or memcalc estimate"
    if "comm_hook" in given:
        raise InputError(f"--comm-hook {given['comm_hook']}: {why}")
    if given.get("optimizer") in OF_DEEPSPEED:
        raise InputError(f"--optimizer {given['optimizer']}: {why}")


_NOT_RUN: Final = ("packing", "offload_activations", "neftune_alpha", "reentrant_checkpoints")
"""The options of fine-tuning that the command's reference step does not have."""


def _refuse_to_run(option: str) -> NoReturn:
    from memcalc.errors import InputError
    from memcalc.inputs.options import option_name

    raise InputError(f"{option_name(option)}: is not run by validate; allowed: leave it out")
