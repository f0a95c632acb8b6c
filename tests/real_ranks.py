"""Processes that meet over gloo: what they send each other arrives. Each runs the engines' oracles in worlds of two and of
four ranks, one after the other."""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from records import on_record

COUNT = 4
WAIT_SECONDS = 400
"""All cases take 40 seconds of an idle machine."""
WORLDS = (2, 4)
Sent = dict[str, tuple[int, int]]
"""Collective -> calls, bytes of the full tensors."""
Steps = dict[str, Sent]
"""A case's name -> what a step of it sends."""


@on_record
def of_all_ranks(cases: dict[str, tuple[str, dict[str, Any]]]) -> list[Steps]:
    """`cases`: name -> (the oracle, its arguments, `gpus` among them). Rank by rank of the world of four."""
    with tempfile.TemporaryDirectory() as folder:
        return _of_all_ranks(Path(folder), cases)


def _of_all_ranks(folder: Path, cases: dict[str, tuple[str, dict[str, Any]]]) -> list[Steps]:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_one_rank, args=(rank, str(folder), cases, results)) for rank in range(COUNT)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + WAIT_SECONDS
    while len(found) < COUNT:
        if not results.empty():
            found |= [results.get()]
        elif any(isinstance(steps, str) for steps in found.values()):
            break  # the others wait for one that has raised
        elif any(process.exitcode is not None and rank not in found for rank, process in enumerate(processes)):
            break  # or for one that died and says nothing
        elif time.monotonic() > end:
            break
        else:
            time.sleep(0.05)
    for process in processes:
        if len(found) < COUNT:
            process.kill()
        process.join()
    failed = {rank: steps for rank, steps in found.items() if isinstance(steps, str)}
    assert not failed, "\n".join(failed.values())
    waiting = "\n".join(path.read_text() for path in sorted(folder.glob("waits.*")))
    assert len(found) == COUNT, f"exit codes {[process.exitcode for process in processes]}\n{waiting}"
    return [found[rank] for rank in range(COUNT)]


def _one_rank(rank: int, folder: str, cases: dict[str, tuple[str, dict[str, Any]]], results: Any) -> None:
    import deepspeed_oracle  # noqa: F401  # all that is there before the first step
    import fsdp2_oracle  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)  # there are as many processes
    stacks = Path(folder, f"waits.{rank}").open("w")  # noqa: SIM115  # as long as the process
    faulthandler.dump_traceback_later(WAIT_SECONDS * 0.9, file=stacks)
    try:
        steps = {
            name: counted(case[0], _step(rank, f"{folder}/{i}", *case)) for i, (name, case) in enumerate(cases.items())
        }
    except Exception:
        results.put((rank, traceback.format_exc()))
    else:
        results.put((rank, steps))
    os._exit(0)  # with the groups that are left


def counted(engine: str, step: Any) -> Sent:
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    if engine == "deepspeed":
        from deepspeed_oracle import SIZES

        for (kind, dtype, elements), n in step.sent.items():
            calls[kind] += n
            payload[kind] += n * elements * SIZES[dtype][1]
    else:
        for call in step.sent:
            kind, size = call[:2] if engine == "fsdp2" else call[1:]
            calls[kind] += 1
            payload[kind] += size
    return {kind: (calls[kind], payload[kind]) for kind in calls}


def _step(rank: int, store: str, oracle: str, arguments: dict[str, Any]) -> Any:
    gc.freeze()  # the oracles collect often, and there are the modules of three libraries to go through
    gpus = arguments["gpus"]
    how = {**arguments, "rank": rank % gpus, "store": f"{store}.{rank // gpus}"}
    if oracle == "deepspeed":
        from deepspeed_oracle import deepspeed_step

        return deepspeed_step(**how)
    if oracle == "ddp":
        from ddp_oracle import replicated_step

        return replicated_step(**how)
    from fsdp2_oracle import sharded_step

    del how["gpus"]
    return sharded_step(**how)
