"""Recipes: values that files hold exactly, and that refuse what they cannot mean."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hyperball.training import ModelConfig, Recipe, RecipeError
from hyperball.training.recipe.fields import hints

RECIPES = {
    "default": Recipe(),
    "paper": Recipe(steps=42_500, precision="bf16", seed=2**62).override(
        {
            "data.name": "cifar10", "data.crop": "mirror", "data.flip": True, "model.name": "cnn9",
            "model.magnitude": "tanh(rho=2, relative=False)", "model.angular": "sigmoid(k=0.3)",
            "model.options": {"norm_eps": 1e-3, "norm_momentum": 0.001}, "schedule.name": "step",
            "schedule.unit": "steps", "schedule.milestones": [20_000, 30_000, 37_500],
            "regularizers.label_smoothing": 0.01, "regularizers.orthogonality": 0.5e-5, "projection.every": 100,
            "optimizer.weight_decay": 5e-4, "optimizer.decay": "weights+norms",
        }
    ),
    "awkward numbers": Recipe(epochs=1).override({"optimizer.lr": 0.1 + 0.2, "optimizer.eps": 5e-324}),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_file_gives_back_the_very_recipe(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"recipe{suffix}"
    RECIPES[name].to_file(path)
    assert Recipe.from_file(path) == RECIPES[name]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_recipe_is_plain_json() -> None:
    for recipe in RECIPES.values():
        assert json.loads(json.dumps(recipe.to_dict())) == recipe.to_dict()


def test_yaml_takes_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("optimizer: {lr: 1e-3, weight_decay: 5E-4}\nschedule: {name: step, milestones: [1, 2.5]}\n")
    recipe = Recipe.from_file(path)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (1e-3, 5e-4)
    assert recipe.schedule.milestones == (1.0, 2.5)


REFUSED = [
    ({"modle": {}}, "unknown key `modle`; did you mean 'model'?"),
    ({"model": {"magnitud": "log"}}, "unknown key `model.magnitud`; did you mean 'magnitude'?"),
    ({"model": {"magnitude": "tahn"}}, "`model.magnitude`: unknown radial function 'tahn'; did you mean 'tanh'?"),
    ({"model": {"magnitude": 3}}, "`model.magnitude` must be a text or null, got 3"),
    ({"model": {"magnitude": "tanh", "weighting": "lineer"}}, "did you mean 'linear'?"),
    ({"model": {"angular": "square_cosine"}}, "`model.angular` must be 'cosine' without a `model.magnitude`"),
    ({"model": []}, "`model` must be a mapping, got []"),
    ({"optimizer": {"lr": "fast"}}, "`optimizer.lr` must be a number, got 'fast'"),
    ({"optimizer": {"lr": -1.0}}, "`optimizer.lr` must be > 0, got -1.0"),
    ({"optimizer": {"lr": float("nan")}}, "`optimizer.lr` must be a number, got nan"),
    ({"optimizer": {"name": "adamm"}}, "got 'adamm'; did you mean 'adam'?"),
    ({"optimizer": {"betas": [0.9]}}, "`optimizer.betas` must be a list of a number, a number, got [0.9]"),
    ({"optimizer": {"nesterov": True}}, "`optimizer.nesterov` needs sgd with `optimizer.momentum` > 0"),
    ({"batch_size": True}, "`batch_size` must be a whole number, got True"),
    ({"batch_size": 1.5}, "`batch_size` must be a whole number, got 1.5"),
    ({"seed": -1}, "`seed` must be in 0..2**63 - 1, got -1"),
    ({"epochs": 3, "steps": 7}, "`epochs` and `steps` exclude each other, got 3 and 7; set one to null"),
    ({"optimizer": {"lr": 1e38}}, "`optimizer.lr` must be at most 1e30, got 1e+38"),
    ({"optimizer": {"radius_lr": 1e38}}, "`optimizer.radius_lr` must be in [0, 1e30] or null, got 1e+38"),
    ({"optimizer": {"weight_decay": 1e38}}, "`optimizer.weight_decay` must be in [0, 1e6], got 1e+38"),
    ({"model": {"options": {"num_classes": 3}}}, "`model.options.num_classes` must be left out"),
    ({"schedule": {"name": "step"}}, 'needs `schedule.milestones` or `schedule.every`'),
    ({"schedule": {"name": "step", "milestones": [2, 1]}}, "`schedule.milestones` must be in ascending order"),
    ({"schedule": {"milestones": [2]}}, 'are for `schedule.name` "step", got \'constant\''),
    ({"projection": {"every": 10}}, "`projection.every` acts on decoupled layers and needs a `model.magnitude`"),
    ({"homotopy": {"steps": 10}}, "`homotopy.steps` acts on decoupled layers"),
    (
        {"model": {"magnitude": "tanh", "weighting": "linear"}, "projection": {"every": 10}},
        '`projection.every` needs `model.weighting` "none", got \'linear\'',
    ),
    ({"regularizers": {"ema": 1.0}}, "`regularizers.ema` must be between 0 and 1, or null, got 1.0"),
    ({"data": {"outliers": 1.5}}, "`data.outliers` must be a share in [0, 1), got 1.5"),
    ({"adversarial": {"method": "fgsm", "step": 0.1}}, "`adversarial.step` must be null for fgsm"),
    ({"precision": "fp8"}, "`precision` must be one of 'fp32', 'tf32', 'bf16', 'fp16', got 'fp8'"),
]  # fmt: skip


@pytest.mark.parametrize("values, message", REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_a_wrong_recipe_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["magnitude", "angular", "weighting", "norm", "activation", "pool", "projection", "name"]
)
def test_a_field_is_not_smuggled_in_as_an_option(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"`model\.options\.{name}` must be left out: `model\.{name}` says it"):
        ModelConfig(magnitude="tanh", options={name: "log"})


FILES = [
    ("recipe.json", "{", "is not valid JSON"),
    ("recipe.yaml", "a: [", "is not valid YAML"),
    ("recipe.yaml", "seed: 1\nseed: 2", "the key 'seed' stands there twice"),
    ("recipe.json", '{"seed": 1, "seed": 2}', "the key 'seed' stands there twice"),
    ("recipe.json", "[" * 100_000, "nested at most 50 deep"),
    ("recipe.yaml", "[" * 3_000, "nested at most 50 deep"),
    ("recipe.json", '{"model": {"options": {"a": ' + "[" * 60 + "]" * 60 + "}}}", "nested at most 50 deep"),
    ("recipe.yaml", "a: &a [*a]", "nested at most 50 deep"),
    ("recipe.yaml", "- 1", "`recipe` must be a mapping"),
    ("recipe.toml", "", "must end in one of .json, .yaml, .yml"),
    ("recipe.yaml", "seed: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    ("recipe.yaml", "name: 2020-13-45", "is not valid YAML (month must be in 1..12"),
    ("recipe.yaml", "seed: 0x_", "is not valid YAML"),
    ("recipe.yaml", "seed: !!int ''", "is not valid YAML"),
    ("recipe.yaml", f"seed: {'9' * 5_000}", "is not valid YAML"),
]


@pytest.mark.parametrize("name, text, message", FILES, ids=[f"{name} {text[:20]}" for name, text, _ in FILES])
def test_a_wrong_file_is_refused_by_name(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        Recipe.from_file(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nothing\.yaml: no such file"):
        Recipe.from_file(tmp_path / "nothing.yaml")


def test_override_changes_what_it_names_alone() -> None:
    changed = Recipe().override({"model.magnitude": "log", "seed": 3, "model.options.width": 8})
    assert Recipe().differences(changed) == {
        "model.magnitude": (None, "log"), "model.options": ({}, {"width": 8}), "seed": (0, 3),
    }  # fmt: skip
    assert dataclasses.replace(Recipe(), seed=3) == Recipe().override({"seed": 3})


@pytest.mark.parametrize("path", ["modell.magnitude", "model.magnitudes", "seed.x"])
def test_override_refuses_unknown_names(path: str) -> None:
    with pytest.raises(RecipeError, match=r"unknown key|has no parts"):
        Recipe().override({path: 1})


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().seed = 1  # type: ignore[misc]


def test_every_section_knows_its_own_name() -> None:
    for name, kind in hints(Recipe).items():
        if dataclasses.is_dataclass(kind):
            assert kind.section == name


def test_a_model_is_asked_for_what_was_chosen_alone() -> None:
    assert ModelConfig().arguments == {}
    chosen = ModelConfig(magnitude="ball", norm="none", pool="huber", options={"width": 4}).arguments
    assert chosen == {
        "magnitude": "ball", "angular": "cosine", "weighting": "none", "norm": None, "pool": "huber", "width": 4,
    }  # fmt: skip


def test_the_length_of_a_run_is_in_epochs_or_steps() -> None:
    assert Recipe().total_steps(7) == 70
    assert Recipe(epochs=3).total_steps(7) == 21
    assert Recipe(steps=5).total_steps(7) == 5


def test_jsonargparse_reads_files_and_dotted_options(tmp_path: Path) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    path = tmp_path / "recipe.yaml"
    RECIPES["paper"].to_file(path)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Recipe, "recipe")
    parsed = parser.parse_args([f"--recipe={path}", "--recipe.model.magnitude=log", "--recipe.seed=5"])
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert build(parsed)["recipe"] == RECIPES["paper"].override({"model.magnitude": "log", "seed": 5})


def test_a_whole_number_that_no_float_holds_is_refused_by_name():
    with pytest.raises(RecipeError, match=r"`optimizer\.lr` must be"):
        Recipe.from_dict({"optimizer": {"lr": 10**400}})
