"""A table of two tiny cells for the tests of experiments, and runs that nobody trained."""

import json
from pathlib import Path

from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.files import write_json
from hyperball.training import Recipe


def tiny_recipe(**changes) -> Recipe:
    recipe = Recipe.from_dict({
        "data": {"name": "clouds", "train_size": 20, "test_size": 20, "points": 16},
        "model": {"name": "points", "pool": "mean"}, "epochs": 1, "batch_size": 10,
    })  # fmt: skip
    return recipe.override(changes)


def tiny_table() -> Experiment:
    entry = Entry(
        "mean", "clean", tiny_recipe(), 80.0, {"50 %": {"outliers": 0.5}}, {"50 %": 40.0}, also={"map_raw": 70.0}
    )
    other = Entry("max", "clean", tiny_recipe(**{"model.pool": "max"}), None)
    reduction = Reduction(lambda recipe: recipe, "nothing")
    return Experiment("tiny", "A tiny table", "nobody", "error", (entry, other), reduction, also=("map_raw", "ece"))


def write_record(job, top1: float = 0.75, recipe: Recipe | None = None, **changes) -> Path:
    """The folder of a finished run without training: `recipe` is the record's own."""
    last = {"top1": top1, "samples": 10_000, "epoch": 1.0, "step": 4, "map_raw": 0.5}
    tree = {
        "recipe": (recipe or job.cell.recipe).to_dict(), "status": "finished", "conditions": {}, "engine": {},
        "results": {"last": last, "best": last, "first_epoch": last}, "environment": {}, "timing": {"seconds": 1.0},
        "format": 1, **changes,
    }  # fmt: skip
    write_json(job.folder / "recipe.json", job.cell.recipe.to_dict())
    write_json(job.folder / "record.json", tree)
    line = {"kind": "evaluation", **last}
    (job.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return job.folder / "record.json"
