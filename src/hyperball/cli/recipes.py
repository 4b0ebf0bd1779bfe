"""A recipe from a file and the command line: every field is an option, `--model.magnitude=log`."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jsonargparse

from hyperball.cli.commands import COMMANDS
from hyperball.cli.parsing import UsageError, choose, with_suggestion
from hyperball.experiments import catalog
from hyperball.files import SUFFIXES
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError, Section, described, hints, suggestion

WORDS = ("true", "false", "yes", "no", "null")
GENERAL = "how long, how large, how exact"


def sections() -> Iterator[tuple[str, type[Section]]]:
    """The sections of a recipe by name, and the recipe itself as the first, whose name is empty."""
    yield "", Recipe
    for name, kind in hints(Recipe).items():
        if is_section(kind):
            yield name, kind


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def fields() -> dict[str, Any]:
    """The annotation of every field by its dotted name."""
    return {
        kind.dotted(name): hint for _, kind in sections() for name, hint in hints(kind).items() if not is_section(hint)
    }


def argument_texts(kind: type) -> dict[str, str]:
    """What a docstring's "Args:" says of each field."""
    _, _, text = (kind.__doc__ or "").partition("Args:\n")
    entries = re.split(r"^        (?=\w+: )", text, flags=re.MULTILINE)[1:]
    return {entry.partition(":")[0]: " ".join(entry.partition(":")[2].split()) for entry in entries}


class RecipeParser(jsonargparse.ArgumentParser):
    """Options of a command, then every field of a recipe; values are read by the fields' annotations."""

    def __init__(self, command: str, usage: str) -> None:
        super().__init__(
            prog=f"hyperball {command}", usage=f"hyperball {command} {usage}", exit_on_error=False, allow_abbrev=False,
            description=COMMANDS[command].description, formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_recipe(self, only: str | None = None) -> None:
        """An option for every field, in a group for every section, or for those of one section."""
        default = Recipe()
        for section, kind in sections():
            if only is not None and section != only:
                continue
            texts, values = argument_texts(kind), getattr(default, section) if section else default
            title = f"{section}: {first_line(kind)}" if section else GENERAL
            group = self.add_argument_group(title)
            for name, hint in hints(kind).items():
                if not is_section(hint):
                    about = texts.get(name, described(hint)).rstrip(".")
                    text = f"{about} (default: {as_text(getattr(values, name))})".replace("%", "%%")
                    path = kind.dotted(name)
                    group.add_argument(f"--{path}", type=hint, default=argparse.SUPPRESS, metavar="", help=text)

    def read(self, given: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The command's own options, and the fields of a recipe that were given."""
        try:
            flat = vars(self.parse_args(with_flags(given)).as_flat())
        except (argparse.ArgumentError, jsonargparse.ArgumentError) as error:
            raise refusal(str(error), list(given), self._option_string_actions) from None
        known = fields()
        changes = {key: value for key, value in flat.items() if key in known}
        for key, value in list(changes.items()):
            if isinstance(value, dict) and value:  # an empty one takes the place of what a recipe has
                changes.update({f"{key}.{part}": item for part, item in changes.pop(key).items()})
        return {key: value for key, value in flat.items() if key not in known}, changes


def with_flags(given: Sequence[str]) -> list[str]:
    """The arguments, with =true after a field that is true or false and stands there without a value."""
    flags = {f"--{name}" for name, hint in fields().items() if hint is bool or bool in get_args(hint)}
    following = [*given[1:], ""] if given else []
    bare = [text in flags and after.lower() not in WORDS for text, after in zip(given, following, strict=True)]
    return [f"{text}=true" if alone else text for text, alone in zip(given, bare, strict=True)]


def as_text(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def refusal(message: str, given: Sequence[str], options: Any) -> ValueError:
    """A parser's complaint in the words of a recipe's own, where it is about a field."""
    key = re.match(r'Parser key "([^"]+)"', message)
    if key is None or key[1] not in fields():
        return UsageError(with_suggestion(message, options))
    hint, text = fields()[key[1]], given_text(key[1], given)
    return RecipeError(f"`{key[1]}` must be {described(hint)}, got {text!r}{suggestion(hint, text)}")


def given_text(key: str, given: Sequence[str]) -> str:
    """The text after `--key=` or `--key`."""
    for index, text in enumerate(given):
        if text.startswith(f"--{key}="):
            return text.partition("=")[2]
        if text == f"--{key}" and index + 1 < len(given):
            return given[index + 1]
    return ""


def build(source: str | None, changes: dict[str, Any]) -> Recipe:
    """The recipe of a file or a name of the catalog, or the default one, with these changes."""
    if source is None:
        recipe = Recipe()
    elif Path(source).suffix in SUFFIXES:
        recipe = Recipe.from_file(source)
    else:
        choose("recipe", source, catalog.RECIPES)
        recipe = catalog.RECIPES[source].recipe
    return catalog.changed(recipe, changes)


def as_yaml(recipe: Recipe) -> str:
    """What `--print_config` prints: a file that reproduces the recipe."""
    yaml = importlib.import_module("yaml")
    return str(yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True))


def run_folder(out: str | None, source: str | None, recipe: Recipe) -> Path:
    """The folder of a run: as asked, else runs/ and the name of the recipe, else of model and operator."""
    if out:
        return Path(out)
    if source:
        return Path("runs") / Path(source).stem
    operator = re.sub(r"[^\w.]+", "-", f"{recipe.model.magnitude or 'plain'}-{recipe.model.angular}").strip("-")
    return Path("runs") / f"{recipe.data.name}-{recipe.model.name}-{operator}-{recipe.seed}"
