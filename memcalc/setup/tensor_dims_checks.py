"""Checks of tensor parallelism in more than one dimension: grids that ranks can form, models that Colossal-AI's layers
build, and sizes that they can cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.families.base.architecture import Architecture
    from memcalc.inputs.model import Model
    from memcalc.layout.tensor_dims.grid import Grid

_SHAPES = {"2": "q²", "2.5": "d·q²", "3": "l³"}


def check_grid(options: Options) -> None:
    """Raise InputError if the tensor-parallel ranks form no grid of the asked dimensions."""
    dims, ranks, depth = options.tp_dims, options.tp, options.tp_depth
    if depth is not None and dims != "2.5":
        refuse("tp_depth", depth, "is the depth of two and a half dimensions; allowed: with --tp-dims 2.5")
    if dims == "1":
        return
    if options.engine not in (None, "colossalai"):
        why = f"{options.engine} cuts tensors in one dimension"
        refuse("tp_dims", dims, f"{why}; allowed: 1, or --engine colossalai")
    from memcalc.layout.tensor_dims.grid import grid_of, near

    if grid_of(dims, ranks, depth) is None:
        shape = f"{depth}·q²" if depth is not None else _SHAPES[dims]
        allowed = " or ".join(f"--tp {n}" for n in near(dims, ranks, depth))
        refuse(
            "tp_dims", dims, f"needs a tp of {shape} with a side of 2 or more, not {ranks}; allowed: 1, or {allowed}"
        )


def tp_depth_of(options: Options) -> int | None:
    """Return the number of squares in two and a half dimensions; None in others."""
    if options.tp_dims != "2.5":
        return None
    from memcalc.layout.tensor_dims.grid import grid_of

    grid = grid_of(options.tp_dims, options.tp, options.tp_depth)
    return None if grid is None else grid.depth


def check_colossalai(options: Options, precision: str, seq_len: int | None, model: Model | None) -> None:
    """Raise InputError for what Colossal-AI's layers or its training loop do not do, or what is not modelled of them."""
    from memcalc.layout.tensor_dims.grid import grid_of

    grid = grid_of(options.tp_dims, options.tp, options.tp_depth)
    assert grid is not None
    if options.tp == 1:
        refuse("engine", "colossalai", f"with tp 1 {NOT_YET}with --tp 2 or more, or another engine")
    if model is None:
        why = "a number of parameters does not tell how its matrices are cut"
        refuse("engine", "colossalai", f"{why}; allowed: with --model instead of --params")
    if precision.endswith("-autocast"):
        refuse("precision", precision, f"with engine colossalai {NOT_YET}fp32, bf16, fp16, bf16-mixed, fp16-mixed")
    _check_methods(options)
    a = _architecture(options, model)
    _check_sizes(options, grid, model.name or f"this {model.model_type}", a)
    if seq_len is not None and seq_len < 2:
        refuse("seq_len", seq_len, "titans' loss leaves out each sequence's last token; allowed: 2 or more")


def _check_methods(options: Options) -> None:
    split = f"with engine colossalai {NOT_YET}"
    if options.sequence_parallel:
        refuse("sequence_parallel", "on", f"{split}off")
    if options.recompute != "none":
        refuse("recompute", options.recompute, f"{split}none")
    if options.padded:
        refuse("padded", "on", f"{split}off")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, "Colossal-AI's layers have kernels of their own; allowed: leave it out")
    if options.clip_grad_norm:
        refuse("clip_grad_norm", "on", f"{split}off")
    if options.lora_rank:
        refuse("lora_rank", options.lora_rank, f"{split}0")
    if options.freeze is not None:
        refuse("freeze", options.freeze, f"{split}leave it out")
    if options.global_batch_size not in (None, options.micro_batch_size * (options.gpus // options.tp)):
        one = options.micro_batch_size * (options.gpus // options.tp)
        refuse("global_batch_size", options.global_batch_size, f"gradient accumulation {split}{one}")
    from memcalc.optimizers import OPTIMIZERS

    if not OPTIMIZERS[options.optimizer].elementwise:
        allowed = ", ".join(name for name, one in OPTIMIZERS.items() if one.elementwise)
        refuse("optimizer", options.optimizer, f"over parts of matrices {NOT_YET}{allowed}")


def _architecture(options: Options, model: Model) -> Architecture:
    """Return the model's architecture if it is a GPT of titans."""
    from memcalc.families.base.architecture import architecture_of

    name = model.name or f"this {model.model_type}"

    def not_built(has: str) -> NoReturn:
        gpt = "learned positions, layer norms, biases, gelu and a tied head, as in gpt2"
        given = ("tp_dims", options.tp_dims) if options.tp_dims != "1" else ("engine", "colossalai")
        refuse(*given, f"{name} has {has}, and titans' GPT has {gpt}; allowed: such a model, or --engine megatron")

    if model.support.architecture is None or model.support.only_engine is not None:
        not_built(f"the layers of a {model.model_type}")
    a = architecture_of(model.model_type, model.program.config)
    has = (
        (a.experts is not None, "experts"), (a.latent is not None, "latent attention"),
        (a.positions is None, "rotary positions"),
        (a.gated, "a gated MLP"), (a.rms_norm, "RMS norms"), (a.kv_heads != a.heads, "fewer key/value heads"),
        (not (a.qkv_bias and a.linear_bias), "linear layers without biases"), (a.qk_norm, "norms of queries and keys"),
        (not a.tied, "a head of its own"),
    )  # fmt: skip
    for there, what in has:
        if there:
            not_built(what)
    activation = getattr(model.program.config, model.support.activation_field)
    if "gelu" not in activation:
        not_built(f"the activation {activation}")
    return a


def _check_sizes(options: Options, grid: Grid, name: str, a: Architecture) -> None:
    """Raise InputError for a size that the grid does not divide (`divide` in colossalai/legacy/nn/layer/utils)."""
    cut = f"{grid.dims}D tensor parallelism over {grid.ranks} ranks"
    given = ("tp", options.tp)
    for what, size, unit in (
        ("attention heads", a.heads, grid.side),
        ("hidden", a.hidden, grid.hidden_unit),
        ("ffn", a.ffn, grid.ffn_unit),
    ):
        if size % unit:
            refuse(
                *given, f"{name} has {size} {what}, and {cut} needs a multiple of {unit}; allowed: a tp that divides"
            )
    from memcalc.layout.tensor_dims.gpt import ROWS_WHOLE

    if a.vocab <= ROWS_WHOLE:
        why = f"{name} has {a.vocab} tokens, and up to {ROWS_WHOLE} Colossal-AI leaves the rows of the vocabulary whole, which"
        refuse(*given, f"{why} {NOT_YET}a larger vocabulary")
    positions = a.positions or 0
    if positions > ROWS_WHOLE and positions % grid.vocab_unit:
        why = f"{name} has {positions} positions, which {cut} cuts by rows"
        refuse(*given, f"{why}; allowed: a multiple of {grid.vocab_unit} positions")
    if options.micro_batch_size % grid.batch_parts:
        why = f"{cut} cuts the sequences into {grid.batch_parts} equal parts"
        refuse("micro_batch_size", options.micro_batch_size, f"{why}; allowed: a multiple of {grid.batch_parts}")
