"""Megatron-LM's arguments: the options of a setup that they mean.

Source: validate_args of megatron/training/arguments.py, and core/transformer/transformer_config.py,
core/model_parallel_config.py and core/optimizer/optimizer_config.py, NVIDIA/Megatron-LM at d98e8a64 and Megatron-Core
0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from memcalc.formats.found import REPLICAS, Found, Value
from memcalc.formats.megatron_activations import offloaded, recomputed
from memcalc.formats.megatron_arguments import GPUS_PER_NODE, NODES, WORKSPACES, arguments_of
from memcalc.formats.megatron_fp8 import format_of, fp8_of
from memcalc.formats.megatron_model import model_of
from memcalc.formats.megatron_notes import STATES, check_modelled, is_precision_aware, notes_of
from memcalc.formats.megatron_section import Arguments
from memcalc.formats.megatron_stages import stages_of
from memcalc.formats.megatron_unread import unknown, unread

__all__ = ["arguments_of", "read"]

_DEGREES: Final = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}
_SIZES: Final = {
    "micro_batch_size": "--micro-batch-size",
    "global_batch_size": "--global-batch-size",
}
_SCHEDULED: Final = "--step-batch-size-schedule"
_DTYPES: Final = ("fp32", "bf16", "fp16")
_LEVELS: Final = "--hierarchical-context-parallel-sizes"
_BACKENDS: Final = {"flash": "flash", "fused": "sdpa", "unfused": "unfused", "local": "eager", "auto": None}
"""AttnBackend (core/transformer/enums.py) in memcalc's names."""
_COMM_TYPES: Final = {
    "p2p": "p2p",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "a2a": "a2a",
    "a2a+p2p": "a2a+p2p",
}
_OPTIMIZERS: Final = {"adam": "adamw", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
_USER_BUFFERS: Final = "--tp-comm-overlap"
_USER_BUFFER_STREAMS: Final = 3  # _NUM_MAX_UB_STREAMS in transformer_engine/pytorch/cpp_extensions/gemm.py
_GROUPED_STREAMS: Final = 4
_STAGES: Final = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""The ZeRO stage of each `--data-parallel-sharding-strategy`."""


def read(file: str, arguments: Mapping[str, Any], *, with_model: bool = True) -> Found:
    """Return what Megatron-LM's arguments say: the options, and the model unless `with_model` is false. Raises
    InputError. `arguments` is what `arguments_of` makes."""
    a = Arguments(file, arguments)
    check_modelled(a)
    notes: list[str] = []
    options = {
        "engine": _engine(a),
        **_layout(a, notes),
        **stages_of(a),
        **_step(a, notes),
        **_sharded(a, notes),
        **_precision(a, notes),
        **recomputed(a, notes),
        **offloaded(a, notes),
        **_kernels(a),
    }
    model, of_model = model_of(a) if with_model else (None, ())
    files = _files(a)
    notes += [*of_model, *notes_of(a), *unread(a), *unknown(a)]
    return Found(options, model, files, tuple(dict.fromkeys(notes)))


def _engine(a: Arguments) -> Value:
    if a.on("--deepspeed"):  # Megatron-DeepSpeed's pretrain_gpt
        return a.value("--deepspeed", "deepspeed")
    return Value("megatron", f"{a.file or a.option}", is_given=False)


def _files(a: Arguments) -> dict[str, Value]:
    """Return the DeepSpeed configuration that Megatron-DeepSpeed is given."""
    if not a.on("--deepspeed"):
        return {}
    a.ignore("--no-pipeline-parallel")
    path = next(iter(a.names("--deepspeed-config")), None)
    return {} if path is None else {"deepspeed": a.value("--deepspeed-config", path)}


# --- GPUs


def _layout(a: Arguments, notes: list[str]) -> dict[str, Value]:
    """Return the parallel degrees, and the number of GPUs if a launch script tells it."""
    out: dict[str, Value] = {}
    for option, key in _DEGREES.items():
        degree = a.whole(key, 1, 10**6)
        if degree is not None:
            out[option] = a.value(key, degree)
    shards = a.whole("--tensor-parallel-num-weight-shards", 1)
    if shards is not None and shards != _degree(out, "tp"):
        a.reject("--tensor-parallel-num-weight-shards", "weights sharded beyond tp are not modelled; allowed: tp")
    etp = a.whole("--expert-tensor-parallel-size", 1, 10**6)
    if etp is not None and a.whole("--num-experts"):
        out["etp"] = a.value("--expert-tensor-parallel-size", etp)
    elif etp is None and a.given("--moe-extended-tp"):
        notes.append("--moe-extended-tp: counted as --expert-tensor-parallel-size of tp")
    out |= _gpus(a)
    out |= _sequences(a, out)
    return out


def _degree(options: Mapping[str, Value], name: str) -> int:
    return options[name].value if name in options else 1


def _gpus(a: Arguments) -> dict[str, Value]:
    """Return the numbers of a launch script. `--nnodes 1:4` is from one to four nodes."""
    nodes, each = "--" + NODES, "--" + GPUS_PER_NODE.replace("_", "-")
    counts = {key: _number(str(a.content.get(key)).rpartition(":")[2]) for key in (nodes, each)}
    if not counts[each]:
        return {}
    out = {"gpus_per_node": a.value(each, counts[each])}
    if counts[nodes]:
        out["gpus"] = Value(counts[nodes] * counts[each], f"{a.where(nodes)} and {each}")
    return out


def _number(text: str) -> int:
    """Return a number of GPUs or nodes; 0 if a text is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0


def _sequences(a: Arguments, degrees: Mapping[str, Value]) -> dict[str, Value]:
    """Return how a sequence is shared by ranks. One tensor-parallel rank has no sequence parallelism."""
    key = "--sequence-parallel"
    on = a.on(key) and _degree(degrees, "tp") > 1
    out = {"sequence_parallel": a.value(key, on) if a.given(key) else a.default(key, False)}
    kinds = {kind.lower() for kind in a.names("--cp-comm-type")}
    if _degree(degrees, "cp") == 1 or not kinds:
        return out
    if len(kinds) > 1:
        a.refuse(
            "--cp-comm-type", f"different kinds by layer are not modelled; allowed: one of {', '.join(_COMM_TYPES)}"
        )
    (kind,) = kinds
    levels = _levels(a, kind, degrees["cp"].value)
    if 1 in levels:  # Transformer Engine takes the other one alone (attn_forward_func_with_cp)
        kind = "p2p" if levels[0] == 1 else "a2a"
    if kind not in _COMM_TYPES:
        a.refuse("--cp-comm-type", f"not modelled; allowed: {', '.join(_COMM_TYPES)}")
    out["cp_comm_type"] = a.value("--cp-comm-type", _COMM_TYPES[kind])
    return out | ({"cp_exchange_size": a.value(_LEVELS, levels[0])} if kind == "a2a+p2p" else {})


def _levels(a: Arguments, kind: str, ranks: int) -> list[int]:
    """Return the ranks that exchange heads, and those of the rings; [] with one kind of context parallelism. Raises
    InputError for more than two levels."""
    if kind != "a2a+p2p":
        return []
    if _LEVELS not in a:
        a.refuse("--cp-comm-type", f"Megatron needs {_LEVELS} with it; allowed: p2p, allgather, a2a, or with that")
    words = a.names(_LEVELS)
    sizes = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 7]
    if len(sizes) != len(words) or len(sizes) != 2 or sizes[0] * sizes[1] != ranks:
        a.refuse(_LEVELS, f"allowed: the ranks of a2a and of p2p, whose product is the context-parallel size {ranks}")
    return sizes


# --- the step


def _step(a: Arguments, notes: list[str]) -> dict[str, Value]:
    out: dict[str, Value] = {}
    for option, key in _SIZES.items():
        size = a.whole(key, 1, 10**10)
        if size is not None:
            out[option] = a.value(key, size)
    key = a.first("--seq-length", "--encoder-seq-length")
    length = a.whole(key, 1, 10**8)
    if length is not None:
        out["seq_len"] = a.value(key, length)
    key = "--no-create-attention-mask-in-dataloader"
    documents = "--dataloader-inter-document-masking"
    if a.on(key) or a.on(documents):
        out["attention_mask_in_dataloader"] = a.value(key if a.on(key) else documents, False)
    if a.on("--perform-rl-step"):
        out["task"] = a.value("--perform-rl-step", "grpo")
    scheduled = _last_batch_size(a)
    if scheduled is not None and "global_batch_size" not in out:
        out["global_batch_size"] = a.value(_SCHEDULED, scheduled)
        notes.append(f"{a.shown(_SCHEDULED)}: counted with its last batch size, {scheduled}")
        return out
    for name in ("--rampup-batch-size", _SCHEDULED):
        if a.given(name):
            notes.append(f"{a.shown(name)}: every step has the whole --global-batch-size")
    return out


def _last_batch_size(a: Arguments) -> int | None:
    """Return the batch size of the last entry of "0:384 200B:768"; None if there is none."""
    sizes = re.findall(r"[\w.]+:(\d{1,10})(?=\s|$)", a.text(_SCHEDULED) or "")
    return int(sizes[-1]) or None if sizes else None


def _sharded(a: Arguments, notes: list[str]) -> dict[str, Value]:
    """Return the optimizer and how its states are sharded, offloaded and clipped."""
    out = _optimizer(a)
    norm = a.number("--clip-grad")
    out["clip_grad_norm"] = a.default("--clip-grad", True) if norm is None else a.value("--clip-grad", norm > 0)
    if a.text("--optimizer") == "dist_muon":
        out["zero"] = a.value("--optimizer", 1)
    if a.on("--use-distributed-optimizer"):
        out["zero"] = a.value("--use-distributed-optimizer", 1)
    elif a.on("--deepspeed") and (stage := a.whole("--zero-stage", 0, 3)) is not None:
        out["zero"] = a.value("--zero-stage", stage)
    if a.on("--use-megatron-fsdp"):
        key = "--data-parallel-sharding-strategy"
        strategy = a.choice(key, tuple(_STAGES)) or "optim_grads_params"
        out["zero"] = a.value(key if key in a else "--use-megatron-fsdp", _STAGES[strategy])
        notes.append("--use-megatron-fsdp: counted as Megatron's data parallelism and distributed optimizer")
    if a.on("--use-torch-fsdp2"):
        out["zero"] = a.value("--use-torch-fsdp2", 2 if a.on("--torch-fsdp2-no-reshard-after-forward") else 3)
    if a.on("--optimizer-cpu-offload"):
        out["offload_optimizer"] = a.value("--optimizer-cpu-offload", "cpu")
        share = a.number("--optimizer-offload-fraction")
        if share is not None and share < 1:
            notes.append(f"{a.shown('--optimizer-offload-fraction')}: all states are offloaded")
    return out | _instances(a) | _precision_aware(a)


def _optimizer(a: Arguments) -> dict[str, Value]:
    key, allowed = "--optimizer", ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")
    name = a.choice(key, allowed)
    if name is None:
        return {"optimizer": a.default(key, "adamw")}
    if name == "sgd":
        momentum = a.number("--sgd-momentum")
        return {"optimizer": a.value(key, "sgd" if momentum == 0 else "sgd-momentum")}
    if name not in _OPTIMIZERS:
        a.refuse(key, f"not modelled; allowed: sgd, {', '.join(_OPTIMIZERS)}")
    return {"optimizer": a.value(key, _OPTIMIZERS[name])}


def _precision_aware(a: Arguments) -> dict[str, Value]:
    """Return the dtypes of the precision-aware optimizer's states; megatron_notes.py has a note where it is not modelled."""
    if not is_precision_aware(a):
        return {}
    out = {"precision_aware_optimizer": a.value("--use-precision-aware-optimizer", True)}
    for key, dtypes in STATES.items():
        dtype = a.choice(key, dtypes)
        if dtype is not None:
            out[key[2:].replace("-", "_")] = a.value(key, dtype)
    return out


def _instances(a: Arguments) -> dict[str, Value]:
    """Return the instances of the distributed optimizer, each with all shards."""
    key = "--num-distributed-optimizer-instances"
    instances = a.whole(key, 1, 10**6)
    return {} if instances in (None, 1) else {REPLICAS: a.value(key, instances)}


# --- dtypes


def _precision(a: Arguments, notes: list[str]) -> dict[str, Value]:
    """Return the precision, how products are cast to fp8, and the dtype of main gradients if it is not what memcalc takes for
    the precision."""
    halves = [key for key in ("--bf16", "--fp16") if a.on(key)]
    if len(halves) == 2:
        a.reject("--fp16", "Megatron refuses it beside --bf16; allowed: one of them")
    eight = format_of(a)
    products = None if eight is None else fp8_of(a, notes)
    half = halves[0] if halves else None
    if eight is not None and products is None:
        precision = a.value(eight, "fp8-mixed")
    elif half is None and a.hidden:  # it may be among what is not read
        return {}
    elif half is None:
        precision = a.default("--bf16", "fp32")
    else:
        precision = a.value(half, f"{half.removeprefix('--')}-mixed")
    out = {"precision": precision, **(products or {})}
    main = a.choice("--main-grads-dtype", ("fp32", "bf16"))
    if half == "--bf16" and (a.on("--grad-reduce-in-bf16") or main == "bf16"):
        out["grad_dtype"] = a.value("--main-grads-dtype" if main == "bf16" else "--grad-reduce-in-bf16", "bf16")
    elif half == "--fp16" and a.on("--accumulate-allreduce-grads-in-fp32"):
        out["grad_dtype"] = a.value("--accumulate-allreduce-grads-in-fp32", "fp32")
    return out


def _kernels(a: Arguments) -> dict[str, Value]:
    out: dict[str, Value] = {}
    if a.on("--no-gradient-accumulation-fusion"):
        out["gradient_accumulation_fusion"] = a.value("--no-gradient-accumulation-fusion", False)
    out |= _attention(a) | _workspaces(a)
    fused = "--cross-entropy-loss-fusion"
    implementation = a.choice("--cross-entropy-fusion-impl", ("native", "te"))
    if a.on(fused):
        out["cross_entropy"] = a.value(fused, "fused" if implementation == "te" else "vocab-parallel-fused")
    return out


def _workspaces(a: Arguments) -> dict[str, Value]:
    """Return the workspaces of cuBLAS, and of Transformer Engine if products of experts are computed one by one, or if
    products with tensor parallelism overlap their communication (get_cublas_workspace in
    transformer_engine/pytorch/cpp_extensions/gemm.py: one for all products, one for each stream of grouped products, and one
    of `_NUM_MAX_UB_STREAMS` times the size for products with user buffers)."""
    environment = "--" + WORKSPACES.replace("_", "-")
    config = a.text(environment)
    out = {} if config is None else {WORKSPACES: a.value(environment, config)}
    if _is_local(a) or a.on("--deepspeed"):
        return out
    routed = a.given("--num-experts", ("0",))
    grouped = a.on("--moe-grouped-gemm")
    if a.on(_USER_BUFFERS) and (a.whole(_DEGREES["tp"], 1, 10**6) or 1) > 1:
        if not a.on("--sequence-parallel"):
            a.reject(
                _USER_BUFFERS, "Megatron refuses it without sequence parallelism; allowed: with --sequence-parallel"
            )
        count = 1 + _USER_BUFFER_STREAMS + (_GROUPED_STREAMS if routed and grouped else 0)
        return out | {"te_workspaces": a.value(_USER_BUFFERS, count)}
    if routed and not grouped:
        return out | {"te_workspaces": a.default("--moe-grouped-gemm", 1)}
    return out


def _is_local(a: Arguments) -> bool:
    return a.choice("--transformer-impl", ("local", "transformer_engine", "inference_optimized")) == "local"


def _attention(a: Arguments) -> dict[str, Value]:
    key = "--attention-backend"
    name = a.text(key)
    backend = None if name is None else name.strip().lower().removeprefix("attnbackend.")
    if backend is not None and backend not in _BACKENDS:
        a.refuse(key, f"allowed: {', '.join(_BACKENDS)}")
    if _is_local(a):
        return {"attention": a.value("--transformer-impl", "eager")}
    if backend is None and a.on("--deepspeed"):  # Megatron-DeepSpeed's own attention, unless it is told otherwise
        return {"attention": a.value("--use-flash-attn", "flash")} if a.on("--use-flash-attn") else {}
    found = _BACKENDS.get(backend or "auto")
    return {} if found is None else {"attention": a.value(key, found)}
