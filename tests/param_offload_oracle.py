"""What DeepSpeed's ZeRO-3 really has on the GPU and on the host when it offloads parameters: `offload_oracle`'s tensors of two
places. A mode for functions that is entered again while it is active takes each move twice, the second time as one to
the host; `PlacesOnce` is entered once."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed_oracle import configuration
from offload_oracle import Sent, TwoPlaces, beside_host
from oracle import build
from per_op import CHECKPOINTS
from torch.overrides import _get_current_function_mode_stack

from memcalc.validate.host import Places


class PlacesOnce(Places):
    """Places that are known once, however often they are entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[bool] = []

    def __enter__(self) -> PlacesOnce:
        self.entered.append(self not in _get_current_function_mode_stack())
        if self.entered[-1]:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.entered.pop():
            super().__exit__(*error)


@dataclass
class Moved:
    """Bytes of a steady step on one rank: the GPU's peak by phase, the host's by kind between steps and at most, and what is
    copied from one to the other by phase."""

    phases: dict[str, int]
    host: dict[str, int]
    most_host: dict[str, int]
    copied: dict[tuple[str, str], int]
    sent: Sent


def param_offload_step(
    config: dict[str, Any],
    *,
    gpus: int,
    optimizer: str = "none",
    params: str = "cpu",
    rank: int = 0,
    precision: str = "bf16",
    seq_len: int = 16,
    micro_batches: int = 1,
    clipping: float = 0.0,
    recompute: bool = False,
    steps: int = 3,
    frozen: tuple[str, ...] = (),
    **options: int,
) -> Moved:
    """`engine(...)`, `engine.backward`, `engine.step`, `steps` times; the last is reported."""
    import deepspeed

    places = PlacesOnce()
    mode = TwoPlaces(places)
    settings = configuration(3, precision, micro_batches, clipping, options)
    settings["zero_optimization"] |= {"offload_optimizer": {"device": optimizer}, "offload_param": {"device": params}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(beside_host(gpus, rank, places))
        model = build(config, "sdpa", torch.float32)
        if recompute:
            model.gradient_checkpointing_enable(CHECKPOINTS["full"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))
        ids = torch.zeros((1, seq_len), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        with mode, places:
            for tensor in [*batch.values(), *model.parameters(), *model.buffers()]:
                mode.register(tensor)
            del tensor
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=settings
            )
            result = None
            for _ in range(steps):
                result = _step(mode, engine, batch, micro_batches)
        engine.destroy()
    assert result is not None
    return result


def _step(mode: TwoPlaces, engine: Any, batch: Any, micro_batches: int) -> Moved:
    gc.collect()
    host = {k: n for k, n in mode.host.items() if n}
    mode.most_host, mode.sent = Counter(mode.host), Counter()
    phases: dict[str, int] = {}
    copied: Counter[tuple[str, str]] = Counter()

    def ends(phase: str) -> None:
        phases[phase] = mode.highest if phase == "step" else max(phases.get(phase, 0), mode.highest)
        copied.update({(phase, way): n for way, n in mode.copied.items()})
        mode.copied = Counter()

    mode.copied = Counter()
    for _ in range(micro_batches):
        mode.begin("forward")
        engine.held_loss = engine(**batch).loss
        gc.collect()
        ends("forward")
        mode.begin("backward")
        engine.backward(engine.held_loss)
        ends("backward")
        mode.begin("step")
        engine.step()
        ends("step")
    most = {k: n for k, n in mode.most_host.items() if n}
    return Moved(phases, host, most, dict(copied), mode.sent)
