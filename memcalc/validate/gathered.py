# pyright: basic
"""Weights that an engine has gathered for the time of a layer: neither a rank's parameters nor saved activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from memcalc.validate.reference import Job


class Gathered:
    """The gathered weights of a job, from its construction on."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._of_modules: WeakValueDictionary[int, Any] = WeakValueDictionary()
        if any(hasattr(parameter, "ds_tensor") for parameter in job.parameters()):
            for module in (part for whole in job.modules for part in whole.modules()):
                module.register_forward_pre_hook(self._note)

    def nbytes(self) -> int:
        """Return the bytes of the gathered weights that are alive, and of the buffers that they are gathered in."""
        return sum(self.storages().values())

    def storages(self) -> dict[int, int]:
        """Return the storages of the gathered weights -> bytes of each."""
        now = [t.untyped_storage() for root in self.job.modules for t in (*_of_fsdp2(root), *_of_zero_3(root))]
        return {s._cdata: s.nbytes() for s in (*now, *self._of_modules.values())}

    def _note(self, module: torch.nn.Module, _: Any) -> None:
        """Record the weights that ZeRO-3's own hook has just gathered (runtime/zero/parameter_offload.py). If an op
        saves one, it stays alive when the parameter has released it."""
        for whole in _whole_of_zero_3(module):
            storage = whole.untyped_storage()
            self._of_modules[storage._cdata] = storage


def _of_fsdp2(root: Any) -> Iterator[torch.Tensor]:
    """Yield a unit's outputs of the all-gather, which the weights are views of, and the last gather's buffer
    (torch/distributed/fsdp/_fully_shard)."""
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        group = None if state is None else state._fsdp_param_group
        if group is None:
            continue
        for parameter in group.fsdp_params:
            yield from getattr(parameter, "all_gather_outputs", ())
        before = getattr(group.comm_ctx, "all_gather_state", None)
        for result in (group._all_gather_result, before and before.all_gather_result):
            if result is not None:
                yield result.all_gather_output


def _of_zero_3(root: Any) -> Iterator[torch.Tensor]:
    """Yield the gathered weights, and those being gathered (runtime/zero/partition_parameters.py)."""
    yield from _whole_of_zero_3(root)
    for handle in getattr(root, "ds_inflight_param_registry", {}).values():
        for one in getattr(handle, "handles", (handle,)):
            yield from getattr(one, "partitions", ())


def _whole_of_zero_3(module: Any) -> Iterator[torch.Tensor]:
    """Yield the data of partitioned parameters, which is empty while they are partitioned."""
    for parameter in module.parameters():
        if not getattr(parameter, "ds_persist", True):
            yield parameter.data
