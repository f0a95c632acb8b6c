"""Processes that meet over gloo: what they send each other arrives. Each runs the engines' oracles in worlds of two and of
four ranks, one after the other."""

from __future__ import annotations

import faulthandler
import gc
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch

COUNT = 4
WAIT_SECONDS = 400
"""All cases take 40 seconds of an idle machine."""
WORLDS = (2, 4)
Steps = dict[str, Any]
"""A case's name -> what its oracle returns."""


def of_all_ranks(folder: Path, cases: dict[str, tuple[str, dict[str, Any]]]) -> list[Steps]:
    """`cases`: name -> (the oracle, its arguments, `gpus` among them). Rank by rank of the world of four."""
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
        steps = {name: _step(rank, f"{folder}/{i}", *case) for i, (name, case) in enumerate(cases.items())}
    except Exception:
        results.put((rank, traceback.format_exc()))
    else:
        results.put((rank, steps))
    os._exit(0)  # with the groups that are left


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
