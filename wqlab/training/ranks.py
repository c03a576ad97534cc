"""Several processes that train one model, one GPU each, as torchrun starts them; alone, everything here does nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(NamedTuple):
    """Which process this is: its number among all and on this machine, and how many there are."""

    rank: int = 0
    local: int = 0
    processes: int = 1


def here() -> Ranks:
    """Return what torchrun told this process; without torchrun, that it is alone."""
    return Ranks(*(int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))))


@contextmanager
def joined(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Let the processes talk to each other inside the block."""
    if ranks.processes == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace every gradient by its mean over the processes, in one message."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def any_of(flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is true in any process, so that all stop together."""
    if not dist.is_initialized():
        return flag
    raised = torch.tensor(float(flag), device=device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return bool(raised)
