"""Cells of a grid as tasks of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from hyperball.experiments.jobs.cell import train_cell
from hyperball.experiments.jobs.ends import End, Say, reason_of, told
from hyperball.experiments.jobs.failures import write_down
from hyperball.experiments.jobs.job import Job


def run_ray(jobs: Sequence[Job], count: int | None, say: Say, address: str | None = None) -> list[End]:
    """Every cell as a task of a Ray cluster: that of `address` or the environment, else a local one of `count` CPUs.

    The folders must be on a disk that all machines of the cluster share.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"--executor ray needs ray ({error}); pip install 'hyperball[grid]'") from error
    ours = not ray.is_initialized()
    if ours:
        cluster = address or os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = (
            {"address": cluster} if cluster else {"num_cpus": count or 1, "include_dashboard": False}
        )
        ray.init(log_to_driver=False, configure_logging=False, **options)
    try:
        return list(collect(ray, jobs, count or 1, say))
    finally:
        if ours:
            ray.shutdown()


def collect(ray: Any, jobs: Sequence[Job], count: int, say: Say) -> Iterator[End]:
    # Without a share of a GPU, Ray hides all of them from a task.
    share = min(1.0, ray.cluster_resources().get("GPU", 0.0) / count)
    task = ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(run_task)
    tasks = {task.remote(job): job for job in jobs}
    for number in range(1, len(jobs) + 1):
        (done,), _ = ray.wait(list(tasks), num_returns=1)
        job = tasks.pop(done)
        try:
            reason = ray.get(done)
        except ray.exceptions.RayError as error:
            reason = f"the worker died ({type(error).__name__})"
        end = End(job, reason)
        say(told(end, number, len(jobs)))
        yield end


def run_task(job: Job) -> str:
    """Train a job in a worker; what goes wrong is returned as a text."""
    try:
        train_cell(job.cell.recipe, job.folder, job.data_root, job.accelerator)
    except Exception as error:
        write_down(job.log, error)
        return reason_of(error)
    return ""
