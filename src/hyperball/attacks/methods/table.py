"""The table of attacks, and attacks from texts such as "pgd(steps=50, restarts=5)"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from hyperball.attacks.methods.auto import APGD, APGDDLR, AutoAttack
from hyperball.attacks.methods.black_box import Noise, Square, Transfer, WorstOfK
from hyperball.attacks.methods.task import Attack
from hyperball.attacks.methods.white_box import BIM, FGSM, PGD, Surrogate
from hyperball.rows import nearest

TABLE: dict[str, type[Attack]] = {
    row.name: row for row in (FGSM, BIM, PGD, APGD, APGDDLR, AutoAttack, Square, Transfer, Surrogate, Noise, WorstOfK)
}
TEXT = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)


def names() -> tuple[str, ...]:
    """The names that `parse` takes."""
    return tuple(TABLE)


def parse(given: str | Attack) -> Attack:
    """An attack from its text; arguments are literals, never code.

    >>> parse("pgd(steps=50, restarts=5)")
    PGD(steps=50, step=None, restarts=5, target='none', loss='ce', eot=1)
    """
    if isinstance(given, Attack):
        return given
    found = TEXT.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ValueError(f'an attack is a text such as "pgd" or "pgd(steps=50, restarts=5)", got {given!r}')
    name = found[1]
    if name not in TABLE:
        raise ValueError(f"unknown attack {name!r}; {nearest(name, TABLE)}")
    row = TABLE[name]
    known = [field.name for field in fields(row)]
    arguments = _arguments(given, found[2] or "")
    for key in arguments:
        if key not in known:
            has = nearest(key, known) if known else "it has no parameters"
            raise ValueError(f"{name} has no parameter {key!r}; {has}")
    return row(**arguments)


def parse_all(given: str | Attack | Iterable[str | Attack]) -> list[Attack]:
    """Attacks from "fgsm,bim,pgd(steps=50)" or from a list; each may be there once."""
    if not isinstance(given, str | Attack | Iterable):
        raise TypeError(f'`attacks` must be texts such as "fgsm,pgd(steps=50)" or a list of them, got {given!r}')
    items = split(given) if isinstance(given, str) else [given] if isinstance(given, Attack) else list(given)
    attacks = [parse(item) for item in items]
    if not attacks:
        raise ValueError(f"`attacks` must name at least one of {', '.join(TABLE)}")
    texts = [str(attack) for attack in attacks]
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"`attacks` has {text} twice")
    return attacks


def split(text: str) -> Sequence[str]:
    """The parts between commas that are in no parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _arguments(text: str, inside: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(
            f'{text!r}: give parameters by name and as literals, as in pgd(steps=50, step="2/255")'
        ) from None
