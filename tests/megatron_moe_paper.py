"""The same layer as `megatron_moe_oracle`, on paper."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron_oracle import Calls

from memcalc.core.autograd import Node, backward
from memcalc.core.dims import numel, workload_size
from memcalc.core.dtypes import bf16
from memcalc.core.tensor import Memory, new_tensor
from memcalc.families.base.architecture import Architecture
from memcalc.families.base.module import Module, Run
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layout import Layout


@dataclass
class OnPaper:
    """As `megatron_moe_oracle.Ran`."""

    parameters: dict[str, tuple[int, ...]]
    saved: int
    forward: int
    backward: int
    calls: Calls


def paper_layer(a: Architecture, *, tp: int, ep: int, etp: int, batch: int, seq: int) -> OnPaper:
    layout = Layout(tp, tp > 1, expert_parallel=ep, expert_tensor_parallel=etp, routed=(True,))
    model = GPTModel(a, layout)
    memory, size = Memory(), workload_size(batch, seq)
    run = Run(memory, bf16, "sdpa", False, size.batch, size.seq)
    for weight in model.layer_weights(0):
        if weight.name.startswith("mlp."):
            run.add_weight(weight._replace(name=f"layers.*.{weight.name}", layer=0))
    parameters = {n.removeprefix("layers.*.mlp."): tuple(d.size for d in w.shape) for (n, _), w in run.weights.items()}
    start = len(memory.log)
    memory.enter("forward", 0)
    group = layout.group(size.seq)
    x = new_tensor(memory, (size.batch, group.shard, model.hidden), bf16, "x")
    x.node = Node(memory, lambda node, grads: [], ())
    holder = [x]
    del x
    out = model.moe.forward(Module(run, "layers.*.mlp", 0), holder.pop(), lambda m, h: model.shared_mlp(group, m, h))
    end = len(memory.log)
    memory.enter("backward", None)
    backward(out)
    live, highest, found = 0, 0, {}
    for place, event in enumerate(memory.log[start:], start):
        if place == end:
            found["saved"], found["forward"], highest = live, highest, live
        row = memory.rows[event if event >= 0 else ~event]
        nbytes = numel(row.shape)[0] * row.dtype.itemsize if row.component == "activation" else 0
        live += nbytes if event >= 0 else -nbytes
        highest = max(highest, live)
    grad = numel(out.shape)[0] * 2
    calls: Any = Counter((s.phase, s.kind, numel(s.shape)[0] * s.dtype.itemsize) for s in memory.sent)
    return OnPaper(parameters, found["saved"], found["forward"], highest - grad, calls)
