"""Process groups that send over loopback."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_left: list[Any] = []


def join(count: int, rank: int, store: str) -> None:
    """This process is one of `count` ranks that meet in the file `store`."""
    dist.init_process_group("gloo", rank=rank, world_size=count, store=dist.FileStore(store, count))


def leave() -> None:
    """Leave all groups, and keep them as long as the process lives: a group's destructor waits for its threads, and a
    thread that frees a tensor waits for the lock of the interpreter, which the destructor may hold."""
    _left.extend(distributed_c10d._world.pg_map)
    dist.destroy_process_group()
