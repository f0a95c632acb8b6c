"""`--params 7.5B`: the model states of a bare number of parameters, as sizing questions ask for them.

ZeRO's table (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1) has per parameter K bytes of optimizer states, 2 bytes of
weights and 2 bytes of gradients. Stage 1 shards the states, stage 2 also the gradients, stage 3 also the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, fp32
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import Holdings, state_rows
from memcalc.errors import InputError, quoted
from memcalc.inputs.options import Options, refuse
from memcalc.optimizers import EVERY_OPTIMIZER, Parameter
from memcalc.setup.setup import DTYPES, Setup
from memcalc.units import parse_count

_MOST: Final = 10**15

DECIDES: Final = frozenset(
    {
        "gpus",
        "dp",
        "tp",
        "pp",
        "cp",
        "ep",
        "shard_group",
        "zero",
        "engine",
        "precision",
        "grad_dtype",
        "optimizer",
        "gpu",
    }
)
"""The options that decide the model states, or that are checked against such options. All others need a model."""


def parse_params(given: object) -> int:
    """Return a parameter count from an int or "7.5B". Raise InputError unless it is a whole number from 1 to 10**15."""
    count = given if isinstance(given, int) and not isinstance(given, bool) else None
    if isinstance(given, str):
        count = parse_count(given)
    if count is None or not 1 <= count <= _MOST:
        raise InputError(f"--params {quoted(given)}: allowed: a whole number up to 10^15, or one like 350M, 7.5B, 1T")
    return count


def check_decides(given: Mapping[str, Any]) -> None:
    """Raise InputError for the first given option that model states do not depend on."""
    for name, value in given.items():
        left_out = value is None or (value is False and Options._field_defaults[name] is False)
        if name not in DECIDES and not left_out:
            refuse(name, value, NOT_OF_STATES)


NOT_OF_STATES: Final = (
    "model states of a bare number of parameters (--params) do not depend on it; allowed: leave it out, or --model"
)


class SizeOnly:
    """A bare number of parameters, in the place of a model."""

    name = None
    model_type = None
    layers = None
    notes: tuple[str, ...] = ()

    def __init__(self, num_parameters: int) -> None:
        self.num_parameters = num_parameters
        self.active_parameters = self.trainable_parameters = num_parameters
        self.profiles: dict[Any, Any] = {}

    def holdings(self, setup: Setup) -> Holdings:
        """Return the model states of one rank."""
        if EVERY_OPTIMIZER[setup.optimizer].needs_shapes:
            allowed = ", ".join(name for name, optimizer in EVERY_OPTIMIZER.items() if not optimizer.needs_shapes)
            why = "its states depend on the shapes of the weights"
            refuse("optimizer", setup.optimizer, f"{why}; allowed with --params: {allowed}")
        zero, ranks, total = setup.zero, setup.shards, self.num_parameters
        if setup.engine == "deepspeed":
            total = -(-total // (setup.tp * setup.pp))  # the slice that ZeRO partitions
        if setup.engine == "deepspeed" and setup.pp > 1:
            ranks = setup.dp  # BF16_Optimizer shards its states with --zero 0 too
        dtype = setup.compute_dtype
        if setup.engine == "megatron":
            return self._megatron(setup)
        if setup.engine in ("fsdp2", "fsdp1"):
            return self._fully_sharded(setup, fp32 if setup.has_master_weights else dtype)
        always = [
            _part("parameters", "weights", dtype, total, ranks if zero == 3 else 1),
            *self._states(setup, dtype, -(-total // ranks), total, ranks),
        ]
        if setup.engine == "ddp":
            always.append(_part("buffers", "DDP buckets (gradient_as_bucket_view=False)", dtype, total, 1))
        gradients = (_part("gradients", "gradients", DTYPES[setup.grad_dtype], total, ranks if zero >= 2 else 1),)
        if (
            setup.engine == "deepspeed" and setup.pp > 1
        ):  # a backward's gradients are added to them, and stay until the step
            gradients = (*gradients, _part("gradients", "gradients of a micro-batch", dtype, total, 1))
        return Holdings(tuple(always), backward=gradients, step=gradients, keeps_gradients=False)

    def _megatron(self, setup: Setup) -> Holdings:
        """Return Megatron's model states: 16-bit weights, main gradients in the setup's gradient dtype, fp32 weights and moments
        (core/optimizer/distrib_optimizer.py)."""
        total, ranks = -(-self.num_parameters // (setup.tp * setup.pp)), setup.shards
        dtype = DTYPES[setup.grad_dtype]
        always = (
            _part("parameters", "weights", setup.compute_dtype, total, 1),
            _part("gradients", "main gradients", dtype, total, 1),
            *self._states(setup, setup.compute_dtype, -(-total // ranks), total),
        )
        copies = () if dtype is fp32 else (_part("gradients", "fp32 copy of the gradients", fp32, total, ranks),)
        return Holdings(always, step=copies, keeps_gradients=False)

    def _fully_sharded(self, setup: Setup, dtype: DType) -> Holdings:
        """Return FSDP2's shards of weights, gradients and states, all of one dtype (torch/distributed/fsdp/_fully_shard)."""
        ranks, total = setup.shards, -(-self.num_parameters // setup.tp)
        name = "weights" if ranks == 1 else "weights of the shard"
        shard = Parameter(name, (Dim("⌈parameters/dp⌉", -(-total // ranks)),), 1, False)
        states = [row for row in state_rows(setup, [shard], dtype) if row.shape]
        gradients = _part("gradients", "gradients", dtype, total, ranks)
        always = (_part("parameters", "weights", dtype, total, ranks), *states)
        return Holdings(always, backward=(gradients,), step=(gradients,), keeps_gradients=False)

    def _states(
        self, setup: Setup, dtype: DType, elements: int, total: int | None = None, ranks: int | None = None
    ) -> list[Row]:
        shards = ranks or setup.shards
        rows: list[Row] = []
        updated = dtype
        if setup.has_master_weights:
            updated = fp32
            rows.append(_part("optimizer_states", "fp32 master", fp32, total or self.num_parameters, shards))
        name = "weights" if shards == 1 else "weights of the shard"
        dim = "parameters" if shards == 1 else "⌈parameters/dp⌉"
        states = state_rows(setup, [Parameter(name, (Dim(dim, elements),), 1, False)], updated)
        return rows + [row for row in states if row.shape]  # without the step counters, which have no dims


def _part(component: str, name: str, dtype: DType, total: int, ranks: int) -> Row:
    dim = Dim("parameters", total) if ranks == 1 else Dim("⌈parameters/dp⌉", -(-total // ranks))
    return Row(component, name, (dim,), dtype, source="arXiv 1910.02054")  # type: ignore[arg-type]
