"""What a run of a tensor-parallel rank's program has sent, as collectives of a step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from memcalc.collectives import Collective
from memcalc.dims import evaluate, formula, numel

if TYPE_CHECKING:
    from memcalc.profile import Profile
    from memcalc.setup import Setup
    from memcalc.tensor import Sent

SOURCE: Final = "transformers/distributed/tensor_parallel.py"
SEQUENCE_PARALLEL: Final = "torch/distributed/tensor/parallel/style.py"


def collectives_of_run(profile: Profile, setup: Setup, layers: str) -> list[Collective]:
    """Every call that was noted, those of equal layers together; `layers` is what the stack is called."""
    calls: Counter[Sent] = Counter()
    middle = profile.run.middle
    for sent in profile.run.sent:
        repeated = sent.layer is not None and sent.layer in middle.early
        calls[sent._replace(layer=None if sent.layer is None else 0)] += 1 + middle.more if repeated else 1
    return [_collective(sent, n * setup.micro_batches, setup, layers) for sent, n in calls.items()]


def _collective(sent: Sent, calls: int, setup: Setup, layers: str) -> Collective:
    one = evaluate(numel(sent.shape)[1], setup.micro_batch_size, setup.rows) * sent.dtype.itemsize
    each = f"{formula(sent.shape)}·{sent.dtype.itemsize} B"
    return Collective(
        sent.axis, sent.kind, sent.name, sent.phase, sent.dtype.name, setup.tp, calls, calls * one,  # type: ignore[arg-type]
        f"{calls}·{each} = {calls}·{one} B", None if sent.layer is None else layers, each=each,
        source=SEQUENCE_PARALLEL if setup.sequence_parallel else SOURCE,
    )  # fmt: skip
