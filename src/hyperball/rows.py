"""Rows, values and texts: what `hyperball.radial` and `hyperball.angular` are tables of.

A row is a formula with named parameters. Calling it gives a value, the formula with its parameters filled in:
``tanh(rho=2.0)``. A text, ``"tanh(rho=2)"``, is the same with literals; texts are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Scalar = float | Tensor
Parameter = Scalar | tuple[Scalar, ...]

ALIASES = {"c": "rho", "learn": "learn_rho", "learn_c": "learn_rho"}


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence that helps after a wrong name: the nearest one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


@dataclass(frozen=True, eq=False, repr=False)
class Row:
    """One function of a table: its name, its formula for people, and its parameters with their defaults.

    A parameter whose default is None is filled in by the operation that uses the value (`eps`).
    """

    name: str
    formula: str
    parameters: Mapping[str, float | tuple[float, ...] | None]
    positive: tuple[str, ...] = ()
    at_least: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, **arguments: Any) -> Value:
        return make_value(self, arguments)

    def __repr__(self) -> str:
        return f"<row {self.name}: {self.formula}>"

    @property
    def composed(self) -> bool:
        """Whether gradients come from autograd alone, because the row gives no derivatives of its own."""
        return False


@dataclass(frozen=True, eq=False)
class Value:
    """A row with its parameters: floats or tensors; `options` are those that only a module reads."""

    row: Any
    parameters: Mapping[str, Parameter]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def terms(self) -> tuple[Value, ...]:
        """The values of which this is the sum: itself alone."""
        return (self,)

    @property
    def name(self) -> str:
        return str(self.row.name)

    def with_parameters(self, **parameters: Any) -> Value:
        return replace(self, parameters={**self.parameters, **parameters})

    def __str__(self) -> str:
        shown = {
            key: value
            for key, value in self.parameters.items()
            if self.row.parameters[key] is not None and not _same(value, self.row.parameters[key])
        }
        inner = ", ".join(f"{key}={_shown(value)}" for key, value in {**shown, **self.options}.items())
        return f"{self.name}({inner})" if inner else self.name


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of several radial values: the paper's mixed operators."""

    terms: tuple[Value, ...]

    @property
    def name(self) -> str:
        return " + ".join(term.name for term in self.terms)

    def __str__(self) -> str:
        return " + ".join(str(term) for term in self.terms)


AnyValue = Value | Sum


def _same(value: Parameter, default: Any) -> bool:
    return not isinstance(value, Tensor) and value == default


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():g}" if value.numel() == 1 else f"<{tuple(value.shape)}>"
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return f"<{len(value)} values>"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def make_value(row: Row, arguments: Mapping[str, Any]) -> Value:
    """Check `arguments` against the row and split them into parameters and a module's options."""
    parameters: dict[str, Any] = dict(row.parameters)
    options: dict[str, Any] = {}
    known = [*row.parameters, *_option_names(row)]
    seen: dict[str, str] = {}
    for given, argument in arguments.items():
        key = given if given in known else ALIASES.get(given, given)
        if key in seen:
            raise ValueError(f"`{row.name}` was given `{seen[key]}` and `{given}`, which are the same parameter")
        seen[key] = given
        if key in parameters:
            parameters[key] = check_parameter(row, key, argument, given)
        elif key in _option_names(row):
            options[key] = _check_option(row, given, key, argument)
        elif given in ("relative", "per", *ALIASES):
            raise ValueError(f"`{row.name}` has no radius, so it takes no `{given}`")
        else:
            raise ValueError(f"`{row.name}` has no parameter {given!r}; {nearest(given, _shown_names(row, known))}")
    return Value(row, parameters, options)


def _shown_names(row: Row, known: list[str]) -> list[str]:
    """The names as people write them: a penalty's radius is its c, and it knows no relative one."""
    if getattr(row, "magnitude", True):
        return known
    return [name.replace("rho", "c") for name in known if name != "relative"]


def _option_names(row: Row) -> list[str]:
    learnable = [f"learn_{name}" for name in row.parameters if name != "eps"]
    return [*learnable, *(["per"] if learnable else []), *(["relative"] if "rho" in row.parameters else [])]


def _check_option(row: Row, given: str, key: str, argument: Any) -> Any:
    if key == "per":
        if argument not in ("channel", "layer"):
            raise ValueError(f"`per` of {row.name} must be 'channel' or 'layer', got {argument!r}")
    elif not isinstance(argument, bool):
        raise TypeError(f"`{given}` of {row.name} must be True or False, got {argument!r}")
    return argument


def check_parameter(row: Row, key: str, argument: Any, given: str | None = None) -> Parameter:
    """A parameter as float, tensor or tuple of those; refused if its type or sign is wrong."""
    given = given or key
    vector = isinstance(row.parameters[key], tuple)
    if vector:
        if isinstance(argument, Tensor) and argument.dim() == 1:
            argument = argument.unbind(0)
        if not isinstance(argument, (tuple, list)) or len(argument) < 2:
            raise TypeError(f"`{given}` of {row.name} must be a list of at least two numbers, got {argument!r}")
        return tuple(_check_scalar(row, key, item, given) for item in argument)
    return _check_scalar(row, key, argument, given)


def _check_scalar(row: Row, key: str, argument: Any, given: str) -> Scalar:
    if isinstance(argument, Tensor):
        if not argument.is_floating_point():
            raise TypeError(f"`{given}` of {row.name} must be a floating-point tensor, got {argument.dtype}")
        return argument
    if isinstance(argument, bool) or not isinstance(argument, numbers.Real):
        raise TypeError(f"`{given}` of {row.name} must be a number or a tensor, got {argument!r}")
    number = float(argument)
    if math.isnan(number) or (math.isinf(number) and key != "shape"):
        raise ValueError(f"`{given}` of {row.name} must be finite, got {number}")
    if key in row.positive and number <= 0:
        raise ValueError(f"`{given}` must be > 0, got {number}")
    if number < row.at_least.get(key, -math.inf):
        raise ValueError(f"`{given}` must be >= {row.at_least[key]:g}, got {number}")
    return number


class Table:
    """Rows by name, in order, and the reader of texts."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.rows: dict[str, Row] = {}

    def add(self, row: Row, *, replace: bool = False) -> None:
        if row.name in self.rows and not replace:
            raise ValueError(f"`name` {row.name!r} is already a {self.what} function; pass replace=True to replace it")
        if not isinstance(row.name, str) or not row.name.isidentifier() or keyword.iskeyword(row.name):
            raise ValueError(f"`name` must be an identifier, got {row.name!r}")
        for key, default in row.parameters.items():
            if default is not None:
                check_parameter(row, key, default)
        self.rows[row.name] = row

    def __getitem__(self, name: str) -> Row:
        if name not in self.rows:
            raise ValueError(f"unknown {self.what} function {name!r}; {nearest(name, self.rows)}")
        return self.rows[name]

    def parse(self, text: str) -> AnyValue:
        """``"tanh(rho=2)"`` or a sum ``"linear + tanh(rho=2)"`` as a value."""
        parts = read_text(text)
        if not parts:
            raise ValueError(f"{text!r} is not a {self.what} text; write name or name(parameter=number)")
        terms = tuple(self[name](**dict(arguments)) for name, arguments in parts)
        return terms[0] if len(terms) == 1 else Sum(terms)


def read_text(text: str) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """The names and the literal arguments in a text, term by term; nothing if it is not of that form."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return ()
    terms = []
    for term in _addends(node):
        call = ast.Call(term, [], []) if isinstance(term, ast.Name) else term
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return ()
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError(f"{text!r}: give the parameters of {call.func.id} by name, as in name(parameter=number)")
        terms.append((call.func.id, tuple((str(k.arg), _literal(k.value, text)) for k in call.keywords)))
    return tuple(terms)


# What torch.compiler.assume_constant_result sets, without its import of the compiler: a text is read once a graph.
read_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _addends(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _addends(node.left)
        yield from _addends(node.right)
    else:
        yield node


def _literal(node: ast.expr, text: str) -> Any:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    sign, inner = (-1.0, node.operand) if negative else (1.0, node)  # type: ignore[attr-defined]
    if isinstance(inner, ast.Name) and inner.id == "inf":
        return sign * math.inf
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{text!r}: arguments are literals, got {ast.unparse(node)!r}") from None


class Slot:
    """Stands where a tensor was taken out of a value."""


SLOT = Slot()


def flatten(value: AnyValue) -> tuple[AnyValue, tuple[Tensor, ...]]:
    """The value with its tensors taken out, and those tensors, in order."""
    tensors: list[Tensor] = []

    def take(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        tensors.append(item)
        return SLOT

    return map_scalars(value, take), tuple(tensors)


def rebuild(value: AnyValue, tensors: Iterable[Tensor]) -> AnyValue:
    """The value that `flatten` took apart, with these tensors in its slots."""
    remaining = iter(tensors)
    return map_scalars(value, lambda item: next(remaining) if isinstance(item, Slot) else item)


def map_scalars(value: AnyValue, change: Callable[[Any], Any]) -> AnyValue:
    """The same value with `change` applied to every scalar parameter, in order."""
    terms = []
    for term in value.terms:
        parameters = {
            key: tuple(change(item) for item in held)
            if isinstance(held, tuple)
            else (None if held is None else change(held))
            for key, held in term.parameters.items()
        }
        terms.append(replace(term, parameters=parameters))
    return Sum(tuple(terms)) if isinstance(value, Sum) else terms[0]


def fill(value: AnyValue, **defaults: float) -> AnyValue:
    """Fill in the parameters that are still None (`eps`) from the operation's arguments."""
    terms = tuple(
        replace(
            term, parameters={key: defaults.get(key) if held is None else held for key, held in term.parameters.items()}
        )
        for term in value.terms
    )
    return Sum(terms) if isinstance(value, Sum) else terms[0]


def require_positive(value: AnyValue) -> None:
    """Refuse tensors with entries that a float would be refused for (unless their values cannot be read)."""
    if torch.compiler.is_compiling():
        return
    for term in value.terms:
        for key, held in term.parameters.items():
            for item in held if isinstance(held, tuple) else (held,):
                if isinstance(item, Tensor) and item.device.type == "cpu" and item.numel():
                    _refuse_range(term.row, key, item)


def _refuse_range(row: Row, key: str, tensor: Tensor) -> None:
    try:
        least = float(tensor.detach().min())
    except RuntimeError:  # inside vmap a value cannot be read
        return
    if key in row.positive and least <= 0:
        raise ValueError(f"`{key}` must be > 0 everywhere, got a tensor with minimum {least:g}")
    if least < row.at_least.get(key, -math.inf):
        raise ValueError(f"`{key}` must be >= {row.at_least[key]:g} everywhere, got a tensor with minimum {least:g}")
