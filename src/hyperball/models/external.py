"""torchvision's and timm's models by name, converted where an operator, a pooling or a projection is asked for."""

from __future__ import annotations

import difflib
import importlib
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.functional.decoupled import check_weighting

AUXILIARY = ("googlenet", "inception_v3")
CONVERT_OPTIONS = (
    "magnitude", "angular", "weighting", "pool", "projection", "skip", "convolutions", "keep_shortcuts", "fuse"
)  # fmt: skip
SHARED_OPTIONS = (*CONVERT_OPTIONS, "batch", "pretrained", "num_classes", "enlarge", "small_head")
EXAMPLE_SIZE = (3, 224, 224)
LARGER = {"inception_v3": (3, 299, 299)}


class Enlarged(nn.Module):
    """model(x'), with x' the images enlarged to size × size: small images for a network that is made for large ones."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False))
        return y

    def extra_repr(self) -> str:
        return f"size={self.size}"


def create(source: str, name: str, num_classes: int | None, options: Mapping[str, Any]) -> nn.Module:
    """The model, with random weights unless `pretrained=True`, converted if any option of `convert_model` is given.

    Where a function pools, a `batch` of inputs shows where; without one, random ones of the model's own input size do.
    Decoupled convolutions run in fused blocks on a GPU (`hyperball.convert.fuse_blocks`) unless fuse=False.
    With `enlarge` images are enlarged to that side first. With `small_head` the classifier of torchvision's AlexNet or
    VGG is one linear layer on averages over all positions, as small images need no more.
    """
    given = dict(options)
    size = given.pop("enlarge", None)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"`enlarge` must be a whole number >= 1, got {size!r}")
    model = converted(source, name, num_classes, given)
    return model if size is None else Enlarged(model, size)


def converted(source: str, name: str, num_classes: int | None, given: dict[str, Any]) -> nn.Module:
    """The model, and what `convert_model` makes of it where one of its options is given."""
    conversion = {key: given.pop(key) for key in CONVERT_OPTIONS if key in given}
    check_operator(conversion)
    batch = given.pop("batch", None)
    pretrained = given.pop("pretrained", False)
    if not isinstance(pretrained, bool):
        raise TypeError(f"`pretrained` must be True or False, got {pretrained!r}")
    small = given.pop("small_head", False)
    if not isinstance(small, bool):
        raise TypeError(f"`small_head` must be True or False, got {small!r}")
    make = {"torchvision": from_torchvision, "timm": from_timm}[source]
    model = make(name, num_classes, pretrained, given)
    if small:
        shrink_head(model)
    if all(conversion.get(key) is None for key in ("magnitude", "pool", "projection")):
        return model
    from hyperball.convert.model import convert_model
    from hyperball.convert.structure import find_global_pools

    if batch is None and conversion.get("pool") is not None and not find_global_pools(model):
        batch = example(model, LARGER.get(name, EXAMPLE_SIZE))
    conversion.setdefault("fuse", conversion.get("magnitude") is not None)
    return convert_model(model, inplace=True, batch=batch, **conversion)[0]


def check_operator(conversion: Mapping[str, Any]) -> None:
    """Refuse an unknown angular function or weighting even where no `magnitude` would use it."""
    magnitude = conversion.get("magnitude")
    angular_table.parse(conversion.get("angular", "cosine"))
    check_weighting(
        conversion.get("weighting", "none"), radial_table.parse("linear" if magnitude is None else magnitude)
    )


def example(model: nn.Module, size: tuple[int, ...]) -> torch.Tensor | None:
    """Two random inputs of the size that timm's configuration names, or else `size`; None on the meta device."""
    configuration = getattr(model, "pretrained_cfg", None) or {}
    held = configuration.get("input_size") if isinstance(configuration, Mapping) else None
    like = next((one for one in model.parameters() if one.is_floating_point()), None)
    if like is None or like.is_meta:
        return None
    drawn = torch.rand(2, *(held or size), generator=torch.Generator().manual_seed(0))
    return drawn.to(like.device, like.dtype)


def load(package: str) -> Any:
    """An optional package, or an error that names the extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        raise ImportError(f"{top} is needed for {top}'s models: pip install 'hyperball[vision]' ({error})") from error


def unknown(source: str, name: str, known: list[str]) -> ValueError:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"{source} has {len(known)} models"
    return ValueError(f"unknown {source} model {name!r}; {hint}")


def from_torchvision(name: str, num_classes: int | None, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    models = load("torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise unknown("torchvision", name, known)
    if "weights" in options:
        raise ValueError(f"`weights` is not taken, got {options['weights']!r}; pretrained=True loads the default ones")
    if num_classes is not None:
        options["num_classes"] = num_classes
    if name in AUXILIARY:
        options.setdefault("aux_logits", False)  # with auxiliary heads, training gives a tuple
    if pretrained:
        classes = options.pop("num_classes", None)
        model = models.get_model(name, weights="DEFAULT", **options)
        return model if classes is None else with_classes(model, classes)
    if name in AUXILIARY:
        options.setdefault("init_weights", False)
    built: nn.Module = refuse_unknown_options(models.get_model, name, weights=None, **options)
    return built


def refuse_unknown_options(make: Any, name: str, **options: Any) -> Any:
    try:
        return make(name, **options)
    except TypeError as error:
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if refused:
            close = difflib.get_close_matches(refused[1], SHARED_OPTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{name} refuses an option: {error}{hint}") from error
        raise


def with_classes(model: nn.Module, num_classes: int) -> nn.Module:
    """The model with its classifier, the last linear layer, replaced by one for another number of classes."""
    from hyperball.convert.structure import find_classifier

    path = find_classifier(model)
    old = None if path is None else model.get_submodule(path)
    if path is None or not isinstance(old, nn.Linear):
        raise ValueError(f"`num_classes`: {type(model).__name__} has no linear classifier to replace")
    if old.out_features != num_classes:
        parent, _, last = path.rpartition(".")
        made = nn.Linear(old.in_features, num_classes, old.bias is not None)
        setattr(model.get_submodule(parent), last, made)
    return model


def shrink_head(model: nn.Module) -> None:
    """Global average pooling and one linear layer in place of the three that read 7×7 (AlexNet: 6×6) positions."""
    pool, head = getattr(model, "avgpool", None), getattr(model, "classifier", None)
    layers = [layer for layer in head if isinstance(layer, nn.Linear)] if isinstance(head, nn.Sequential) else []
    if not isinstance(pool, nn.AdaptiveAvgPool2d) or len(layers) < 2 or not isinstance(pool.output_size, tuple):
        raise ValueError(
            f"`small_head` is for networks with a pooling and several linear layers at the end, such as torchvision's "
            f"VGG and AlexNet, got {type(model).__name__}"
        )
    positions = math.prod(side or 1 for side in pool.output_size)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Linear(layers[0].in_features // positions, layers[-1].out_features)


def from_timm(name: str, num_classes: int | None, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    timm = load("timm")
    base = name.partition(".")[0]
    if not timm.is_model(name):
        raise unknown("timm", name, timm.list_models())
    tags = timm.list_pretrained(f"{base}.*") if "." in name else []
    if tags and name not in tags:
        raise unknown("timm", name, tags)
    if num_classes is not None:
        options["num_classes"] = num_classes
    model: nn.Module = refuse_unknown_options(timm.create_model, name, pretrained=pretrained, **options)
    return model
