"""What a checkpoint holds of a run, and a run that goes on from one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hyperball.training.storage.checkpoint import Checkpoint, CheckpointError, check_fit
from hyperball.training.storage.record import environment
from hyperball.training.update import optimizers

if TYPE_CHECKING:
    from hyperball.training.loop import Run


def state_of(run: Run, interval: list[float]) -> Checkpoint:
    """Everything that resuming a run needs; `interval` is what its step tallied since the last report."""
    parts = run.parts
    tensors, values = optimizers.state_by_name(parts.parts.inner)
    sections = {"model": parts.network.model.state_dict(), "optimizer": tensors}
    if parts.parts.average is not None:
        sections["average"] = parts.parts.average.state_dict()
    elapsed = time.perf_counter() - run.began
    info = {
        "recipe": run.recipe.to_dict(),
        "epoch": run.step // run.per_epoch,
        "step_of_epoch": run.step % run.per_epoch,
        "steps_per_epoch": run.per_epoch,
        "random": "all draws are functions of (seed, step, process), the order of samples of (seed, epoch)",
        "schedule": parts.schedule.state_dict(),
        "optimizer": values,
        "scaler": parts.step.scaler_state(),
        "interval": interval,
        "projection": None if parts.projection is None else parts.projection.state_dict(),
        "homotopy": None if parts.homotopy is None else parts.homotopy.state_dict(),
        "results": run.results,
        "notes": run.notes,
        "images": run.images,
        "seconds": {**run.seconds, "total": run.seconds["total"] + elapsed},
        "environment": environment(run.engine.device, run.engine.world_size),
    }
    return Checkpoint(run.step, info, sections)


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Put a run where a checkpoint was; says what differs where the devices do."""
    parts, info = run.parts, checkpoint.info
    where = str(checkpoint.path)
    if info["steps_per_epoch"] != run.per_epoch:
        raise CheckpointError(
            f"{where} counts {info['steps_per_epoch']} steps an epoch, but the set here gives {run.per_epoch}"
        )
    model = parts.network.model
    check_fit(checkpoint.tensors["model"], model.state_dict(), where)
    model.load_state_dict(checkpoint.tensors["model"])
    optimizers.load_state_by_name(parts.parts.inner, checkpoint.tensors.get("optimizer", {}), info["optimizer"])
    if parts.parts.average is not None:
        parts.parts.average.load_state_dict(checkpoint.tensors["average"])
    if parts.projection is not None:
        parts.projection.load_state_dict(info["projection"])
    if parts.homotopy is not None:
        parts.homotopy.load_state_dict(info["homotopy"])
    parts.schedule.load_state_dict(info["schedule"])
    parts.step.load_scaler_state(info["scaler"])
    if "interval" in info:
        parts.step.load_interval(info["interval"])
    run.step, run.results, run.images = checkpoint.step, info["results"], info["images"]
    run.seconds = dict(info["seconds"])
    run.notes = list(info["notes"])
    run.note(f"resumed at step {run.step}")
    run.forget_other_conditions(info["recipe"].get("log", {}).get("conditions", {}))
    for text in changes(info["environment"], environment(run.engine.device, run.engine.world_size)):
        run.note(text)


def changes(before: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """What a resumption on other devices or versions means for the numbers."""
    found = []
    if before["devices"] != present["devices"]:
        found.append(
            f"resumed on {present['devices']} device(s), saved on {before['devices']}: global batches and their order "
            "are the same, sums are rounded in another order and dropout draws differ, so losses agree to rounding "
            "and not to the bit"
        )
    for key in ("device", "versions"):
        if before[key] != present[key]:
            names = (
                key
                if key == "device"
                else ", ".join(n for n in {**before[key], **present[key]} if present[key].get(n) != before[key].get(n))
            )
            found.append(f"resumed with another {key} ({names}): results agree to rounding and not to the bit")
    return found
