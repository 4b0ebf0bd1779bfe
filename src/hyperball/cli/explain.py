"""`explain`: what a layer, written as a call, or a model computes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hyperball.cli.parsing import UsageError, choose, parser

NUMBERS = {"int", "bool", "None"}
SIZES = ("kernel_size", "stride", "dilation", "output_padding")
OPTIONS = ("magnitude", "angular", "weighting", "norm", "activation", "pool", "projection")


def layers() -> dict[str, Any]:
    """The layers by the short names that a text may call."""
    from hyperball import nn

    named = {name: getattr(nn, name) for name in nn.__all__}
    short = {
        "conv": "DecoupledConv2d",
        "conv1d": "DecoupledConv1d",
        "conv2d": "DecoupledConv2d",
        "conv3d": "DecoupledConv3d",
    }
    short |= {"linear": "DecoupledLinear", "pool": "RobustPool2d", "projection": "Projection"}
    return {**{key: named[name] for key, name in short.items() if name in named}, **named}


def read_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name and the literal arguments of a text such as "conv(3, 64, 3, magnitude=tanh)"; nothing is evaluated."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{text!r} is neither a model nor a call of a layer: {getattr(error, 'msg', error)}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UsageError(f'write a layer as a call, "conv(3, 64, 3, magnitude=tanh)", got {text!r}')
    if any(keyword.arg is None for keyword in call.keywords):
        raise UsageError(f"** is not known here, got {text!r}")
    given = {str(keyword.arg): literal(keyword.value, text) for keyword in call.keywords}
    return call.func.id, [literal(node, text) for node in call.args], given


def literal(node: ast.expr, text: str) -> Any:
    """A number, text, tuple or None; a bare name or call, as in magnitude=tanh(rho=2), is its own text."""
    if isinstance(node, ast.Name | ast.Call | ast.BinOp):
        return ast.get_source_segment(text, node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # TypeError: a set or a mapping of what cannot be a key
        raise UsageError(f"{ast.get_source_segment(text, node)!r} is not a plain value in {text!r}") from None


def explain(given: Sequence[str]) -> int:
    """`hyperball explain "LAYER(…)"` or `hyperball explain MODEL [--magnitude …]`."""
    options = parser("explain")
    help_text = "a call of a layer, or a name of `hyperball list models`"
    options.add_argument("what", metavar="LAYER|MODEL", help=help_text)
    for name in OPTIONS:
        options.add_argument(f"--{name}", metavar="TEXT", help="an option of the model; none is None")
    own = options.parse_args(given)
    chosen = {name: getattr(own, name) for name in OPTIONS if getattr(own, name) is not None}
    from hyperball import explain as explained

    if "(" in own.what:
        if chosen:
            raise UsageError(f"--{next(iter(chosen))} is for models; write it into the call")
        print(explained(layer(own.what)))
    else:
        print(explained(model(own.what, chosen)))
    return 0


def layer(text: str) -> Any:
    name, arguments, keywords = read_call(text)
    known = layers()
    kind = known[choose("layer", name, known)]
    try:
        check_numbers(kind, arguments, keywords)
        return kind(*arguments, **keywords)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{text!r} cannot be built: {error}") from error


def check_numbers(kind: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Refuse a text where a layer takes a number, which would fail deep inside of it."""
    signature = inspect.signature(kind)
    for key, value in signature.bind(*arguments, **keywords).arguments.items():
        words = set(re.findall(r"\w+", str(signature.parameters[key].annotation)))
        if isinstance(value, str) and (words <= NUMBERS or key in SIZES):
            raise UsageError(f"`{key}` must be a number, got {value!r}")


def model(name: str, chosen: dict[str, str]) -> Any:
    from hyperball import models

    values: dict[str, Any] = {
        key: None if text.lower() == "none" and key != "weighting" else text for key, text in chosen.items()
    }
    built = models.create(name, **values)
    if not any(type(part).__module__.startswith("hyperball.nn") for part in built.modules()):
        raise UsageError(f"{name} is plain: it has no hyperball layer; give a --magnitude, a --pool or a --projection")
    return built
