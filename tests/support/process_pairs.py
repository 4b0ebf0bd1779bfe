"""Two processes that meet over gloo."""

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed
import torch.multiprocessing


def run_in_two(work: Callable[[int, Path], None], folder: Path) -> None:
    """work(rank, folder) in each of two processes of one group."""
    torch.multiprocessing.spawn(_join_work_and_leave, (work, folder), nprocs=2)


def _join_work_and_leave(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    work(rank, folder)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may still drop a tensor, which aborts an interpreter that is shutting down
