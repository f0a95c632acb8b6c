"""The dispatch mode that counts collectives, over a fake process group."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from memcalc.validate.collectives import Collectives
from memcalc.validate.fake import process_group


def test_calls_and_payload() -> None:
    """Payload is that of the full tensors; a row by torch's own name where there is no other."""
    a, b, many = torch.zeros(6), torch.zeros(10), torch.zeros(24)
    with process_group(4), Collectives() as sent, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = dist.new_group([0, 1])
        dist.all_reduce(a)
        dist.all_reduce(b, group=pair)
        dist.all_reduce_coalesced([a, b])
        dist.all_gather_into_tensor(many, a)
        functional.all_gather_tensor(a, 0, dist.group.WORLD).sum()
        dist.reduce_scatter_tensor(a, many, group=dist.group.WORLD)
        dist.scatter(a, [a] * 4)
        dist.barrier()
    assert sent.calls == {
        ("all_reduce", 4): (2, 24 + 64),
        ("all_reduce", 2): (1, 40),
        ("all_gather", 4): (2, 2 * 96),
        ("reduce_scatter", 4): (1, 96),
        ("scatter_", 4): (1, 96),
    }


def test_only_while_the_mode_is_on_and_in_backward() -> None:
    x = torch.zeros(8, requires_grad=True)
    x.register_hook(dist.all_reduce)
    with process_group(2):
        loss = (2 * x).sum()
        dist.all_reduce(torch.zeros(3))
        with Collectives() as sent:
            loss.backward()
        dist.all_reduce(torch.zeros(3))
    assert sent.calls == {("all_reduce", 2): (1, 32)}


def test_a_pair_of_ranks_of_a_ring_sends() -> None:
    """torch's ring is an all-to-all that gives all to one rank."""
    x = torch.zeros(5)
    with process_group(4), Collectives() as sent:
        functional.all_to_all_single(x, [0, 0, 0, 5], [0, 5, 0, 0], dist.group.WORLD).sum()
    assert sent.calls == {("send", 4): (1, 20)}
