"""The record of a run: its results, what they were measured under, what was decided, and how long it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyperball.on_disk import FINISHED
from hyperball.training.storage.record import Record, environment, peak_memory

if TYPE_CHECKING:
    from hyperball.training.loop import Run


def record_of(run: Run) -> Record:
    """What a run that ends here leaves."""
    return Record(
        recipe=run.recipe.to_dict(),
        status=FINISHED,
        results=run.results,
        conditions=conditions(run),
        engine=decisions(run),
        environment=environment(run.engine.device, run.engine.world_size),
        timing=timing(run),
        notes=list(run.notes),
    )


def conditions(run: Run) -> dict[str, Any]:
    """What the results were measured under."""
    recipe = run.recipe
    return {
        "set": run.dataset.name,
        "train_samples": len(run.dataset.train),
        "test_samples": len(run.dataset.test),
        "steps": run.total,
        "steps_per_epoch": run.per_epoch,
        "batch_size": recipe.batch_size,
        "last_batch": "dropped",
        "seed": recipe.seed,
        "precision": recipe.precision,
        "deterministic": recipe.deterministic,
        "weights": "last iterate" if recipe.regularizers.ema is None else "moving average of the iterates",
        "best": "chosen on the test set",
        "evaluation_batch": run.parts.evaluator.batch_size,
        "classifier_in_tests": "tf32" if recipe.precision == "tf32" else "fp32",
        "parameters": run.parameters(),
    }


def decisions(run: Run) -> dict[str, Any]:
    """What was compiled and captured, and why."""
    step = run.parts.step
    made = {
        "compiled": step.compiled,
        "captured": step.captured,
        "evaluation_captured": run.parts.evaluator.captured,
    }
    return {key: value for name, held in made.items() for key, value in ((name, held.on), (f"{name}_why", held.reason))}


def timing(run: Run) -> dict[str, Any]:
    """Wall time, of all and of the steps after the first alone; images/s of the latter; memory."""
    training = run.seconds["training"]
    return {
        "seconds": round(run.seconds["total"], 3),
        "training_seconds": round(training, 3),
        "seconds_to_first_step": round(run.seconds["first_step"], 3),
        "images_per_second": round(run.images / training, 1) if training else None,
        "peak_memory_bytes": peak_memory(run.engine.device),
    }
