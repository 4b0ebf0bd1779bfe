"""Models by name: the table of our own, and the doors to torchvision's and timm's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from hyperball.models import chain, points, residual
from hyperball.models.layers import Layers
from hyperball.rows import nearest

Builder = Callable[..., nn.Module]
LAYER_OPTIONS = tuple(entry.name for entry in fields(Layers))
SOURCES = ("torchvision", "timm")


@dataclass(frozen=True)
class Entry:
    """One model: its name, what builds it from `Layers`, a sentence, and defaults of its own for layer options."""

    name: str
    build: Builder
    description: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] = (3, 32, 32)
    num_classes: int = 10

    @property
    def options(self) -> tuple[str, ...]:
        """What `create` takes for this model beside `num_classes`."""
        own = [p.name for p in inspect.signature(self.build).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return (*own, *LAYER_OPTIONS)


TABLE: dict[str, Entry] = {}


def register(
    name: str,
    build: Builder,
    *,
    description: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    input_shape: tuple[int, ...] = (3, 32, 32),
    num_classes: int = 10,
    replace: bool = False,
) -> Entry:
    """Add a model: build(layers, num_classes, **options) makes it from the layers that a user's options ask for.

    >>> import torch, hyperball as hb
    >>> def tiny(layers, num_classes, *, width=8):
    ...     head = [torch.nn.Flatten(), layers.classifier(width, num_classes)]
    ...     return torch.nn.Sequential(layers.conv2d(3, width, 3), layers.global_pool(), *head)
    >>> entry = hb.models.register("tiny", tiny, replace=True)
    >>> hb.models.create("tiny", magnitude="ball")(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"`name` must be a text without '/', got {name!r}")
    if name in TABLE and not replace:
        raise ValueError(f"`name` {name!r} is already a model; pass replace=True to replace it")
    if not callable(build):
        raise TypeError(f"`build` must be a function of layers and num_classes, got {build!r}")
    unknown = sorted(set(defaults or {}) - set(LAYER_OPTIONS))
    if unknown:
        raise ValueError(f"`defaults` has the unknown option {unknown[0]!r}; {nearest(unknown[0], LAYER_OPTIONS)}")
    text = (inspect.getdoc(build) or "").partition("\n")[0] if description is None else description
    TABLE[name] = Entry(name, build, text, dict(defaults or {}), input_shape, num_classes)
    return TABLE[name]


def names() -> tuple[str, ...]:
    """Our own models; `create` also takes "torchvision/NAME" and "timm/NAME"."""
    return tuple(TABLE)


def describe(name: str) -> Entry:
    """The entry of one of our own models."""
    if name not in TABLE:
        raise ValueError(f"unknown model {name!r}; {nearest(str(name), names())}")
    return TABLE[name]


def create(name: str, num_classes: int | None = None, **options: Any) -> nn.Module:
    """A model by name, with random weights.

    Our own models (`names()`) take `in_channels`, `magnitude` (None: the plain network), `angular`, `weighting`,
    `norm`, `activation`, `pool`, `projection` and what `describe(name).options` lists. "torchvision/resnet18" and
    "timm/resnet50.a1_in1k" make those libraries' models (`pretrained=False` unless asked) and hand the operator's
    options to `hyperball.convert_model`.

    >>> import torch, hyperball as hb
    >>> hb.models.create("digits", magnitude="tanh", angular="square_cosine")(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a text, got {name!r}")
    if num_classes is not None and (isinstance(num_classes, bool) or not isinstance(num_classes, int)):
        raise TypeError(f"`num_classes` must be a whole number, got {num_classes!r}")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"`num_classes` must be >= 1, got {num_classes}")
    source, _, rest = name.partition("/")
    if rest and source in SOURCES:
        from hyperball.models import external

        return external.create(source, rest, num_classes, options)
    if rest:
        raise ValueError(f"unknown source {source!r} in {name!r}; {nearest(source, SOURCES)}")
    entry = describe(name)
    return _build(entry, entry.num_classes if num_classes is None else num_classes, options)


def _build(entry: Entry, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    for key in options:
        if key not in entry.options:
            raise ValueError(f"{entry.name} has no option {key!r}; {nearest(key, entry.options)}")
    chosen = {**entry.defaults, **options}
    layers = Layers(**{key: value for key, value in chosen.items() if key in LAYER_OPTIONS})
    own = {key: value for key, value in chosen.items() if key not in LAYER_OPTIONS}
    for key in ("in_channels", "width", "features"):
        if key in own and (isinstance(own[key], bool) or not isinstance(own[key], int) or own[key] < 1):
            raise ValueError(f"`{key}` must be a whole number >= 1, got {own[key]!r}")
    return entry.build(layers, num_classes, **own)


for _build_one in (chain.cnn9, chain.cnn9_adv, residual.resnet32):
    register(_build_one.__name__, _build_one)
register("cnn9_features", chain.cnn9_features, input_shape=(1, 28, 28))
register("resnet18", residual.resnet18, input_shape=(3, 224, 224), num_classes=1000)
register(
    "resnet18_modified",
    residual.resnet18_modified,
    defaults={"activation": "prelu"},
    input_shape=(3, 224, 224),
    num_classes=1000,
)
_POINTS = {"pool": "max", "bias": True, "classifier_bias": True}
register("pointnet", points.pointnet, defaults=_POINTS, input_shape=(2048, 3), num_classes=40)
register("digits", chain.digits, defaults={"classifier_bias": True}, input_shape=(1, 8, 8))
register("points", points.points, defaults=_POINTS, input_shape=(256, 3))
