"""A forward and a backward of a stage of GPTModel on paper, measured as megatron_layers_oracle measures the real one."""

from __future__ import annotations

from megatron_layers_oracle import Ran

from memcalc.core.autograd import backward
from memcalc.core.dims import numel, workload_size
from memcalc.core.dtypes import bf16
from memcalc.core.tensor import Memory, new_tensor
from memcalc.families.base.architecture import Architecture
from memcalc.families.base.module import Run
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layout import Layout


def ran_on_paper(a: Architecture, layout: Layout, batch: int, seq: int, attention: str = "sdpa") -> Ran:
    """Return what a micro-batch of `seq` tokens, shared by the ranks of `layout`, saves and needs. A stage that is not the last
    one receives the gradient of its output."""
    model = GPTModel(a, layout)
    memory, size = Memory(), workload_size(batch, seq // layout.tensor_parallel)
    run = Run(memory, bf16, attention, False, size.batch, size.seq, True)
    for weight in model.weights():
        run.add_weight(weight)
    parameters = {w.name.replace("*", str(w.layer)): tuple(d.size for d in w.shape) for w in model.weights()}
    (ids,) = model.give(run)
    start = len(memory.log)
    memory.enter("forward", None)
    out = model.forward(run, ids)
    end = len(memory.log)
    memory.enter("backward", None)
    gradient = None if layout.last else new_tensor(memory, out.shape, bf16, "received gradient")
    backward(out, gradient=gradient)
    live, highest, found = 0, 0, {}
    for place, event in enumerate(memory.log[start:], start):
        if place == end:
            found["saved"], found["forward"], highest = live, highest, live
        row = memory.rows[event if event >= 0 else ~event]
        nbytes = numel(row.shape)[0] * row.dtype.itemsize
        live += nbytes if event >= 0 else -nbytes
        highest = max(highest, live)
    return Ran(parameters, found["saved"], found["forward"], highest)
