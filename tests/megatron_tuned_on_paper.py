"""A forward and a backward of a stage of GPTModel on paper of which a part trains, measured as megatron_tuned_oracle measures
the real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megatron_tuned_oracle import Calls, Ran, Whole

from memcalc.core.autograd import Constant, backward
from memcalc.core.dims import numel, workload_size
from memcalc.core.dtypes import bf16
from memcalc.core.tensor import Memory, Tensor, new_tensor
from memcalc.families.base.architecture import Architecture
from memcalc.families.base.module import Run, Weight
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layout import Layout
from memcalc.megatron.trained import Adapters, Trained
from memcalc.megatron.trained_model import TrainedGPTModel
from memcalc.tape.profile import Choices, trace


class _Stage(TrainedGPTModel):
    """`wants`: the received hidden states want a gradient, as a later stage's do."""

    wants = True

    def received(self, run: Run, tp: object) -> Tensor:
        out = super().received(run, tp)  # type: ignore[arg-type]
        if not self.wants:
            out.node = Constant(run.memory, out) if run.recompute else None
        return out


def full_name(weight: Weight) -> str:
    return weight.name if weight.layer is None else weight.name.replace("*", str(weight.layer), 1)


def trained_part(
    a: Architecture, layout: Layout, frozen: Callable[[str], bool] | None, adapters: Adapters | None
) -> Trained:
    """`frozen` gets a full name; None: all of the base is frozen."""
    names: dict[int | None, set[str]] = {}
    for weight in GPTModel(a, layout).weights():
        if frozen is None or frozen(full_name(weight)):
            names.setdefault(weight.layer, set()).add(weight.name)
    of_layers = tuple(frozenset(names.get(i, ())) for i in range(layout.layers))
    return Trained(of_layers, frozenset(names.get(None, ())), adapters, experts=True)


def tuned_on_paper(
    a: Architecture, frozen: Callable[[str], bool] | None, *, tp: int, batch: int, seq: int, sequence_parallel: bool,
    targets: tuple[str, ...] = (), rank: int = 8, dropout: float = 0.0, received: bool = True, recomputes: bool = False,
) -> Ran:  # fmt: skip
    layout = Layout(
        tp, sequence_parallel, layers=a.layers, first=False, last=False, fuses_accumulation=False, mask_in_batch=False
    )
    adapters = Adapters(rank, frozenset(targets), dropout) if targets else None
    model = _Stage(a, layout._replace(trained=trained_part(a, layout, frozen, adapters)))
    model.wants = received
    memory, size = Memory(), workload_size(batch, seq // tp if sequence_parallel else seq)
    run = Run(memory, bf16, "sdpa", recomputes, size.batch, size.seq, True)
    named: list[dict[str, tuple[int, ...]]] = [{}, {}]
    for weight in model.weights():
        trains = model.wants_gradient(weight)
        run.add_weight(weight, wants_gradient=trains)
        named[not trains][full_name(weight)] = tuple(dim.size for dim in weight.shape)
    (ids,) = model.give(run)
    start = len(memory.log)
    memory.enter("forward", None)
    out = model.forward(run, ids)
    end = len(memory.log)
    memory.enter("backward", None)
    backward(out, gradient=new_tensor(memory, out.shape, bf16, "received gradient"))
    live, highest, found = 0, 0, {}
    for place, event in enumerate(memory.log[start:], start):
        if place == end:
            found["saved"], found["forward"], highest = live, highest, live
        row = memory.rows[event if event >= 0 else ~event]
        nbytes = numel(row.shape)[0] * row.dtype.itemsize
        live += nbytes if event >= 0 else -nbytes
        highest = max(highest, live)
    return Ran(named[0], named[1], found["saved"], found["forward"], highest, sent_of(memory))


def sent_of(memory: Memory) -> Calls:
    return Counter((s.phase, s.kind, numel(s.shape)[0] * s.dtype.itemsize) for s in memory.sent)


def whole_on_paper(
    a: Architecture, frozen: Callable[[str], bool] | None, *, tp: int, batch: int, seq: int, sequence_parallel: bool, vocab: int,
    targets: tuple[str, ...] = (), rank: int = 8,
) -> Whole:  # fmt: skip
    """A whole model with Megatron-Core's attention; `vocab` is that of the real one."""
    layout = Layout(tp, sequence_parallel, layers=a.layers)
    adapters = Adapters(rank, frozenset(targets), 0.0) if targets else None
    model = TrainedGPTModel(a, layout._replace(trained=trained_part(a, layout, frozen, adapters)))
    assert model.vocab.size * tp == vocab
    run = trace(model, Choices(bf16, "eager", False, True), batch, seq // tp if sequence_parallel else seq, a.layers)
    flops: Counter[str] = Counter()
    for work in run.work:
        flops[work.phase] += 2 * work.products * numel(work.factors)[0]
    trained = {full_name(w): tuple(d.size for d in w.shape) for w in model.weights() if model.wants_gradient(w)}
    sent = Counter((s.phase, s.kind, numel(s.shape)[0] * s.dtype.itemsize) for s in run.sent)
    return Whole(trained, sent, dict(flops))
