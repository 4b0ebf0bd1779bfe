"""What a file may say about the model that it holds: a name, a number of classes, and options of the architecture.

Files come from anywhere. Options that make a library read another file (timm unpickles `checkpoint_path`), download or
call something are refused; torchvision's and timm's models take only those that `EXTERNAL_OPTIONS` lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hyperball.rows import Row, Sum, Value, nearest

CONVERSION_OPTIONS = (
    "magnitude", "angular", "weighting", "pool", "projection", "skip", "convolutions", "keep_shortcuts"
)  # fmt: skip
EXTERNAL_OPTIONS = (
    *CONVERSION_OPTIONS, "act_layer", "attention_dropout", "aux_logits", "class_token", "depth", "depths", "dims",
    "drop_block_rate", "drop_path_rate", "drop_rate", "dropout", "dynamic_img_size", "embed_dim", "global_pool",
    "image_size", "img_size", "in_chans", "init_weights", "layers", "mlp_ratio", "norm_layer", "num_heads",
    "output_stride", "patch_size", "stochastic_depth_prob", "transform_input", "width_mult", "window_size",
)  # fmt: skip
REFUSED_OPTIONS = (
    "name", "num_classes", "checkpoint", "checkpoint_path", "weights", "weights_backbone", "pretrained_cfg",
    "pretrained_cfg_overlay", "cache_dir", "url", "file", "hf_hub_id",
)  # fmt: skip
LEFT_OUT = ("pretrained", "batch")  # how a model was made, not what it is
TABLED = (Row, Value, Sum)
NAME = re.compile(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)?")


def model_recipe(path: str | Path, metadata: Mapping[str, Any]) -> tuple[str, int | None, dict[str, Any]]:
    """The name, the number of classes and the options that a file's metadata give for `models.create`, checked.

    `pretrained` and `batch` among the options say how the model was made; they are left out.
    """
    made = metadata.get("model")
    if not isinstance(made, dict) or "name" not in made:
        raise ValueError(f"{path} does not say which model it holds; create one and use hyperball.convert.load")
    try:
        return check_recipe(made["name"], made.get("num_classes"), made.get("options", {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds a model that cannot be made from its metadata: {error}") from None


def check_recipe(name: Any, num_classes: Any, options: Any) -> tuple[str, int | None, dict[str, Any]]:
    """Raise a ValueError unless these make a model out of themselves alone; gives them without `LEFT_OUT`."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"`name` must be that of a model, such as 'resnet18' or 'timm/resnet18', got {name!r}")
    if num_classes is not None and (isinstance(num_classes, bool) or not isinstance(num_classes, int)):
        raise ValueError(f"`num_classes` must be a whole number or None, got {num_classes!r}")
    if not isinstance(options, Mapping):
        raise ValueError(f"`options` must be a mapping of names to values, got {type(options).__name__}")
    kept = {key: value for key, value in options.items() if key not in LEFT_OUT}
    for key, value in kept.items():
        if not isinstance(key, str) or key in REFUSED_OPTIONS:
            raise ValueError(f"the option {key!r} is not one of an architecture, which a file may give")
        if "/" in name and key not in EXTERNAL_OPTIONS:
            raise ValueError(f"a file may not give the option {key!r}; {nearest(key, EXTERNAL_OPTIONS)}")
        check_plain(key, value)
    return name, num_classes, kept


def check_plain(key: str, value: Any) -> None:
    """Texts, numbers, True, False, None, and flat lists of these."""
    items = value if isinstance(value, list | tuple) else (value,)
    for item in items:
        if item is not None and not isinstance(item, str | bool | int | float):
            raise ValueError(f"the option {key!r} must be a text, a number or a list of these, got {value!r}")


def stored_form(item: Any) -> Any:
    """A row or a value of a table as its text, for JSON; what has no text is refused."""
    if isinstance(item, Row):
        return item.name
    if isinstance(item, Value | Sum):
        return " + ".join(map(value_text, item.terms))
    raise TypeError(f"`metadata` must hold texts, numbers, lists and mappings, got {type(item).__name__}")


def value_text(value: Value) -> str:
    """``tanh(rho=2.0)``: the text that is parsed to this very value, to the last digit."""
    held = {}
    for key, parameter in value.parameters.items():
        default = value.row.parameters[key]
        if default is None:
            continue
        plain = tuple(map(as_number, parameter)) if isinstance(parameter, tuple) else as_number(parameter)
        if plain != default:
            held[key] = plain
    inner = ", ".join(f"{key}={item!r}" for key, item in {**held, **value.options}.items())
    return f"{value.name}({inner})" if inner else value.name


def as_number(parameter: Any) -> float:
    if isinstance(parameter, Tensor) and parameter.numel() != 1:
        raise ValueError(f"a value with a parameter per channel cannot be stored, got shape {tuple(parameter.shape)}")
    number = parameter.item() if isinstance(parameter, Tensor) else parameter
    if not math.isfinite(number):
        raise ValueError(f"a value with a parameter that is not finite cannot be stored, got {number}")
    return number if isinstance(number, int) else float(number)
