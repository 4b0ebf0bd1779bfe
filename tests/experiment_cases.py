"""A table of two tiny cells for the tests of experiments."""

from hyperball.experiments.table import Entry, Experiment, Reduction
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
