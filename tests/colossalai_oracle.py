"""Colossal-AI's own parallel layers and titans' GPT, any rank of a `fake` process group, on CPU tensors.

The packages are read from unpacked source distributions (colossalai 0.5.0, titans 0.0.7) in the folder that the environment
variable COLOSSALAI_SOURCES names. Their layers run as they are; what they import of the rest is replaced by stand-ins: the
context that knows the groups, the registry, the accelerator. Without the folder `tests/engines/colossalai/measured.json` has
what they did; `python tests/colossalai_oracle.py` writes it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.tracing.realism import gpu_dropout
from memcalc.validate.collectives import call_of
from memcalc.validate.live import Live

SOURCES = os.environ.get("COLOSSALAI_SOURCES")
MEASURED = Path(__file__).parent / "engines/colossalai/measured.json"
LAYER = "colossalai.legacy.nn.layer"
SMALL: dict[str, Any] = {
    "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 2400,
    "resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "line of 2": {"dims": "1", "ranks": 2, "b": 3, "s": 40, "dtype": "bf16"},
    "line of 4": {"dims": "1", "ranks": 4, "b": 1, "s": 16},
    "line of 4, long table": {"dims": "1", "ranks": 4, "b": 2, "s": 24, "n_positions": 2304},
    "square of 4": {"dims": "2", "ranks": 4, "b": 4, "s": 40},
    "square of 4, bf16": {"dims": "2", "ranks": 4, "b": 2, "s": 33, "dtype": "bf16", "embd_pdrop": 0.1},
    "square of 4, long table": {"dims": "2", "ranks": 4, "b": 2, "s": 16, "n_positions": 2304},
    "square of 4, two tokens": {"dims": "2", "ranks": 4, "b": 2, "s": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "square of 9": {"dims": "2", "ranks": 9, "b": 6, "s": 24, "n_embd": 72, "n_head": 6, "vocab_size": 2403},
    "square of 16, 9 layers": {"dims": "2", "ranks": 16, "b": 4, "s": 24, "n_layer": 9},
    "one square": {"dims": "2.5", "ranks": 4, "depth": 1, "b": 2, "s": 16},
    "two squares": {"dims": "2.5", "ranks": 8, "depth": 2, "b": 8, "s": 64},
    "three squares": {"dims": "2.5", "ranks": 12, "depth": 3, "b": 12, "s": 64, "n_inner": 96, "n_layer": 3},
    "cube of 8": {"dims": "3", "ranks": 8, "b": 4, "s": 33},
    "cube of 8, bf16": {"dims": "3", "ranks": 8, "b": 8, "s": 40, "dtype": "bf16", "n_layer": 9},
    "cube of 8, long table": {"dims": "3", "ranks": 8, "b": 4, "s": 16, "n_positions": 2304},
    "cube of 27": {"dims": "3", "ranks": 27, "b": 9, "s": 24, "n_embd": 108, "n_head": 6, "vocab_size": 2403},
}  # fmt: skip
"""Grid, batch and what differs from SMALL."""


class Context:
    """The groups of this process, in the place of Colossal-AI's global context."""

    def __init__(self) -> None:
        self.ranks: dict[Any, list[int]] = {}
        self.groups: dict[Any, Any] = {}

    def add(self, mode: Any, ranks: list[int]) -> None:
        self.ranks[mode], self.groups[mode] = ranks, dist.new_group(ranks)

    def get_group(self, mode: Any) -> Any:
        return self.groups[mode]

    get_cpu_group = get_group

    def get_world_size(self, mode: Any) -> int:
        return len(self.ranks.get(mode, [0]))

    def get_local_rank(self, mode: Any) -> int:
        return self.ranks[mode].index(dist.get_rank()) if mode in self.ranks else 0

    def is_initialized(self, mode: Any) -> bool:
        return mode in self.ranks

    def get_ranks_in_group(self, mode: Any) -> list[int]:
        return self.ranks[mode]

    @property
    def tensor_parallel_size(self) -> int:
        return dist.get_world_size()


CONTEXT = Context()


class Registry:
    def register_module(self, of: Any) -> Any:
        return of


class Accelerator:
    def get_current_device(self) -> torch.device:
        return torch.device("cpu")


class Held:
    """A call whose tensors are kept until it is waited for, as NCCL keeps them."""

    def __init__(self, work: Any, *tensors: torch.Tensor) -> None:
        self.work, self.tensors = work, tensors

    def wait(self) -> Any:
        self.tensors = ()
        return self.work.wait()


def package(name: str, folder: Path | None = None, **members: Any) -> types.ModuleType:
    """A package whose modules are the real ones of a folder, without what its own __init__ would import."""
    made = types.ModuleType(name)
    made.__path__ = [] if folder is None else [str(folder)]
    vars(made).update(members)
    sys.modules[name] = made
    outer, _, last = name.rpartition(".")
    if outer:
        setattr(sys.modules[outer], last, made)
    return made


def load(sources: Path) -> tuple[Any, Any]:
    """titans' GPT and its loss, over the real layers."""
    col, titans = sources / "colossalai-0.5.0/colossalai", sources / "titans-0.0.7/titans"

    def get(name: str) -> Any:
        return importlib.import_module(name)

    package("colossalai", col)
    package("colossalai.accelerator", get_accelerator=Accelerator)
    package("colossalai.legacy", col / "legacy")
    context = package("colossalai.legacy.context", col / "legacy/context")
    context.ParallelMode = get("colossalai.legacy.context.parallel_mode").ParallelMode
    context.seed = lambda *_: contextlib.nullcontext()
    package("colossalai.legacy.context.parallel_context", global_context=CONTEXT)
    package("colossalai.legacy.core", global_context=CONTEXT)
    package("colossalai.legacy.registry", LAYERS=Registry(), LOSSES=Registry())
    package("colossalai.legacy.utils", checkpoint=None)
    names = ("gather_tensor_parallel_state_dict", "partition_tensor_parallel_state_dict", "broadcast_state_dict")
    package("colossalai.legacy.utils.checkpointing", **dict.fromkeys(names))
    communication = package("colossalai.legacy.communication", col / "legacy/communication")
    calls = get("colossalai.legacy.communication.collective")
    for name in ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"):
        setattr(communication, name, getattr(calls, name))
    own = calls._reduce_scatter_func

    def reduce_scatter(out: Any, given: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        work = own(out, given, op=op, group=group, async_op=async_op)
        return Held(work, out, given) if async_op else work

    calls._reduce_scatter_func = reduce_scatter
    nn = package("colossalai.nn", col / "nn")
    package("colossalai.nn.layer", col / "nn/layer")
    package("colossalai.nn.layer.layernorm", MixedFusedLayerNorm=torch.nn.LayerNorm)
    nn.init = get("colossalai.nn.init")
    package("colossalai.legacy.nn", col / "legacy/nn")
    package(LAYER, col / "legacy/nn/layer")
    package(f"{LAYER}.colossalai_layer", col / "legacy/nn/layer/colossalai_layer")
    for name in ("parallel_2d", "parallel_2p5d", "parallel_3d", "parallel_1d", "vanilla"):
        get(f"{LAYER}.{name}")
    for file, members in (
        ("linear", ("Linear", "Classifier")), ("normalization", ("LayerNorm",)), ("embedding", ("Embedding",)),
        ("dropout", ("Dropout",)), ("_utils", ("partition_batch",)),
    ):  # fmt: skip
        for member in members:
            setattr(nn, member, getattr(get(f"{LAYER}.colossalai_layer.{file}"), member))
    nn.CrossEntropyLoss = get("colossalai.legacy.nn.loss").CrossEntropyLoss
    return _titans(titans, context.ParallelMode)


def _titans(folder: Path, modes: Any) -> tuple[Any, Any]:
    utils: Any = sys.modules[f"{LAYER}.utils"]
    package("colossalai.nn.layer.utils", CheckpointModule=utils.CheckpointModule, divide=utils.divide)
    package("colossalai.nn.layer.wrapper", PipelineSharedModuleWrapper=None)
    vars(sys.modules["colossalai.nn.layer"])["MoeModule"] = None
    package("colossalai.utils", get_current_device=lambda: torch.device("cpu"))
    package("colossalai.pipeline")
    package("colossalai.pipeline.utils", partition_uniform=None)
    package("colossalai.context", ParallelMode=modes)
    package("colossalai.core", global_context=CONTEXT)
    package("colossalai.logging", get_dist_logger=None)
    package("titans", folder)
    package("titans.decorator", no_support=lambda *_: lambda c: c, support_tp_pp_only=lambda *_: lambda c: c)
    for part in ("layer", "layer.attention", "layer.mlp", "layer.embedding", "layer.head", "layer.block", "loss",
                 "loss.lm_loss", "model", "model.gpt"):  # fmt: skip
        package(f"titans.{part}", folder / part.replace(".", "/"))
    for part, file, name in (
        ("layer.attention", "gpt_attention", "GPTSelfAttention"), ("layer.mlp", "transformer_mlp", "TransformerMLP"),
        ("layer.embedding", "gpt_embedding", "GPTEmbedding"), ("layer.head", "gpt_lm_head", "GPTLMHead"),
        ("layer.block", "gpt_block", "GPTBlock"), ("loss.lm_loss", "gpt_lmloss", "GPTLMLoss"),
    ):  # fmt: skip
        found = getattr(importlib.import_module(f"titans.{part}.{file}"), name)
        setattr(sys.modules[f"titans.{part}"], name, found)
    loss = vars(sys.modules["titans.loss.lm_loss"])["GPTLMLoss"]
    return importlib.import_module("titans.model.gpt.gpt").GPT, loss


def groups(dims: str, ranks: int, depth: int) -> None:
    """Make the groups of this rank, as process_group_initializer does."""
    modes: Any = sys.modules["colossalai.legacy.context"].ParallelMode
    env: Any = importlib.import_module("colossalai.legacy.global_variables").tensor_parallel_env
    CONTEXT.ranks.clear()
    CONTEXT.groups.clear()
    me = dist.get_rank()
    CONTEXT.add(modes.TENSOR, list(range(ranks)))
    env.load(mode=f"{dims}d")
    if dims == "1":
        CONTEXT.add(modes.PARALLEL_1D, list(range(ranks)))
        return
    if dims == "3":
        side = round(ranks ** (1 / 3))
        i, j, k = me % side, me // side % side, me // side**2

        def line(of: Any) -> list[int]:
            return [a + side * (b + side * c) for a, b, c in map(of, range(side))]

        def plane(of: Any) -> list[int]:
            every = [of(x, y) for y in range(side) for x in range(side)]
            return [a + side * (b + side * c) for a, b, c in every]

        env.depth_3d = side
        for name, ids in (
            ("input", line(lambda x: (i, x, k))), ("weight", line(lambda x: (x, j, k))), ("output", line(lambda x: (i, j, x))),
            ("input_x_weight", plane(lambda x, y: (x, y, k))), ("output_x_weight", plane(lambda x, y: (x, j, y))),
        ):  # fmt: skip
            mode = getattr(modes, f"PARALLEL_3D_{name.upper()}")
            CONTEXT.add(mode, ids)
            setattr(env, f"{name}_group_3d", mode)
        return
    side = math.isqrt(ranks // depth)
    square = me // side**2 * side**2
    i, j = (me - square) // side, (me - square) % side
    own = {"ROW": [square + i * side + x for x in range(side)], "COL": [square + x * side + j for x in range(side)]}
    kind = "2D" if dims == "2" else "2P5D"
    for name, ids in own.items():
        CONTEXT.add(getattr(modes, f"PARALLEL_{kind}_{name}"), ids)
    if dims == "2":
        env.summa_dim = side
        return
    env.tesseract_dim, env.tesseract_dep = side, depth
    CONTEXT.add(modes.PARALLEL_2P5D_DEP, [x * side**2 + i * side + j for x in range(depth)])
    CONTEXT.add(modes.PARALLEL_2P5D_XZ, [x * side**2 + i * side + y for x in range(depth) for y in range(side)])


class Calls(TorchDispatchMode):
    """(collective, ranks of its group) -> calls and payload."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = call_of(func, args)
        if call is not None:
            self.calls[call.collective.removesuffix("_"), call.ranks, call.payload] += 1
        return func(*args, **(kwargs or {}))


def measure(dims: str, ranks: int, b: int, s: int, depth: int = 1, dtype: str = "fp32", **sizes: Any) -> dict[str, Any]:
    """The second step of the group's last rank: its weights' shapes, the bytes that forward leaves and the peaks of forward
    and backward (over weights and batch), and the calls of collectives."""
    assert SOURCES is not None
    c, kind = SMALL | sizes, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
    try:
        gpt, lm_loss = load(Path(SOURCES))
        groups(dims, ranks, depth)
        torch.set_default_dtype(kind)
        model = gpt(
            vocab_size=c["vocab_size"], max_position_embeddings=c["n_positions"], hidden_size=c["n_embd"],
            num_heads=c["n_head"], depth=c["n_layer"], mlp_ratio=c.get("n_inner", 4 * c["n_embd"]) / c["n_embd"],
            dropout=c["resid_pdrop"], embedding_dropout=c["embd_pdrop"], attention_dropout=c["attn_pdrop"],
        )  # fmt: skip
        torch.set_default_dtype(torch.float32)
        return _second_step(model, lm_loss(), torch.zeros(b // depth, s, dtype=torch.long))
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()


def _second_step(model: Any, criterion: Any, ids: torch.Tensor) -> dict[str, Any]:
    live = Live()
    for tensor in (*model.parameters(), ids):
        live.register(tensor)

    def step() -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        gc.collect()
        before = live.now
        live.begin()
        with Calls() as sent:
            output = model(ids)
            loss = criterion(output, ids)
            gc.collect()
            saved, forward = live.now - before - loss.nbytes, live.highest - before
            live.begin()
            loss.backward()
        calls = [[*call, times] for call, times in sorted(sent.calls.items())]
        return {"saved": saved, "forward": forward, "backward": live.highest - before, "calls": calls}

    with gpu_dropout(), live:
        step()
        found = step()
    return {"weights": sorted(list(p.shape) for p in model.parameters()), **found}


if __name__ == "__main__":
    made = {name: measure(**case) for name, case in CASES.items()}
    lines = ",\n".join(f' "{name}": {json.dumps(one)}' for name, one in made.items())
    MEASURED.write_text(f"{{\n{lines}\n}}\n")
