# pyright: basic
"""The components of a measured step, by whichever counter of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.validate import deepspeed
from memcalc.validate.reference import nbytes, of_rank

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup
    from memcalc.validate.host import Places
    from memcalc.validate.meter import Meter
    from memcalc.validate.reference import Job


class Components(NamedTuple):
    """The bytes of each component; None if an engine has no such moment."""

    parameters: int
    gradients: int | None
    gradients_in_step: int | None
    optimizer_states: int
    saved_activations: int | None


def components(
    setup: Setup, job: Job, meter: Meter, gradients: int | None, device: str, places: Places | None = None
) -> Components:
    """Return the components of a step that has run. `gradients` are those that the optimizer got. States on other
    devices than `device` do not count, and none that `places` knows to be the host's."""
    flat = deepspeed.kept_tensors(job) if setup.engine == "deepspeed" else None

    def on_the_gpu(tensors: Iterable[Any]) -> list[Any]:
        return [t for t in tensors if places is None or not places.is_of_host(of_rank(t))]

    if flat is not None and flat.gradients is not None:
        gradients = nbytes(on_the_gpu(flat.gradients))
    flattened = flat is not None and setup.zero in (1, 2)  # flattened into one buffer, whose padding does not count
    # With the other engines whole gradients come and go.
    whole = setup.engine in ("none", "ddp") or (setup.engine == "deepspeed" and setup.zero in (0, 1))
    kept = flat.parameters if flat else job.parameters()
    if flat and setup.zero == 3:
        kept = [*kept, *getattr(job, "scales", list)()]  # beside the shards of codes
    return Components(
        sum(t.nbytes for t in kept) if flattened else nbytes(on_the_gpu(kept)),
        gradients if whole else None,
        None if whole else gradients,
        nbytes(state for state in on_the_gpu(flat.states if flat else job.states()) if state.device.type == device),
        meter.saved if setup.pp == 1 else None,  # a pipeline's activations are of several micro-batches
    )
