"""What an attack refuses at the door: budgets, images, labels, and models that are not ready."""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.attacks.norms import Norm
from hyperball.data.augment import to_float
from hyperball.data.hashing import has_integers

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
FRACTION = re.compile(rf"\s*({NUMBER})\s*(?:/\s*({NUMBER})\s*)?")


def parse_epsilon(value: Any, name: str = "epsilon") -> float:
    """A number ≥ 0, or a text such as "8/255", "0.03" or "1e-2"; nothing in a text is evaluated.

    >>> parse_epsilon("51/255")
    0.2
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    number = _fraction(value, name) if isinstance(value, str) else number
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(f'`{name}` must be a number or a text such as "8/255", got {value!r}')
    try:
        found = float(number)
    except OverflowError:
        found = math.inf
    if not (found >= 0 and math.isfinite(found)):
        raise ValueError(f"`{name}` must be finite and >= 0, got {value!r:.40}")
    return found


def _fraction(text: str, name: str) -> float:
    found = FRACTION.fullmatch(text)
    if found is None:
        raise ValueError(f'`{name}` must be a number or a fraction such as "8/255", got {text!r}')
    below = 1.0 if found[2] is None else float(found[2])
    if below == 0:
        raise ValueError(f"`{name}` must not divide by zero, got {text!r}")
    return float(found[1]) / below


def budget_text(epsilon: float) -> str:
    """A budget as the shorter of k/255 and a decimal number: one text, however it was given.

    >>> budget_text(0.03137254901960784), budget_text(0.25)
    ('8/255', '0.25')
    """
    whole = round(255 * epsilon)
    texts = [repr(epsilon).removesuffix(".0"), *([f"{whole}/255"] if whole / 255 == epsilon else [])]
    return min(texts, key=len)


def parse_step(value: Any) -> float:
    """The length of a step, a number > 0 or a text such as "2/255"."""
    number = parse_epsilon(value, "step")
    if number == 0:
        raise ValueError(f"`step` must be > 0, got {value!r}")
    return number


def check_epsilon(epsilon: float | str, norm: Norm, shape: torch.Size) -> float:
    """The budget as a number that pixels in [0, 1] can spend."""
    number = parse_epsilon(epsilon)
    reach = norm.reach(shape)
    if number > reach:
        hint = f"; did you mean {epsilon}/255?" if norm.name == "linf" and number <= 255 else ""
        raise ValueError(
            f"`epsilon` must be <= {reach:g}, the {norm.title} distance of the farthest images with pixels in [0, 1], "
            f"got {epsilon!r}{hint}"
        )
    return number


def check_images(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Float images [N, C, H, W] in [0, 1] and int64 labels [N]; bytes are divided by 255."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not len(inputs):
        got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"`inputs` must be at least one image [N, C, H, W], got {got}")
    if inputs.dtype != torch.uint8 and not inputs.is_floating_point():
        raise TypeError(f"`inputs` must be uint8 or floating point, got {inputs.dtype}")
    targets = check_targets(labels, len(inputs))
    inputs = to_float(inputs.detach())
    low, high = (float(bound) for bound in torch.aminmax(inputs))
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"`inputs` must be pixels in [0, 1], got values from {low:g} to {high:g}; "
            "normalization belongs into the model"
        )
    return inputs, targets


def check_targets(labels: Tensor, count: int) -> Tensor:
    """Labels [N] as int64."""
    if not isinstance(labels, Tensor) or labels.shape != (count,) or not has_integers(labels):
        found = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"`labels` must be {count} integers, one a sample, got {found}")
    return labels.long()


def check_mode() -> None:
    """Refuse inference mode, in which nothing has a gradient."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "attacks need gradients, which torch.inference_mode() switches off for good; call them outside of it "
            "(inside torch.no_grad() they work)"
        )


def check_labels(labels: Tensor, classes: int) -> None:
    """Labels among the classes that the model knows."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise ValueError(f"`labels` must be in 0..{classes - 1}, the model's {classes} classes, got {wrong}")


def check_model(model: Any, name: str = "model") -> Callable[[Tensor], Tensor]:
    """A function of images; a module must be in evaluation mode, all of it."""
    if not callable(model):
        raise TypeError(f"`{name}` must be a module or a function from images to logits, got {type(model).__name__}")
    training = [path for path, part in model.named_modules() if part.training] if isinstance(model, nn.Module) else []
    if training:
        first = training[0] or "the whole"
        raise ValueError(
            f"`{name}` must be in evaluation mode, but {len(training)} of its modules are training ({first}); "
            "call model.eval() first: batch statistics and dropout are no defense"
        )
    result: Callable[[Tensor], Tensor] = model
    return result


def check_logits(logits: Any, count: int, name: str = "model") -> int:
    """The number of classes of logits [N, K]."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != count or logits.shape[1] < 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"`{name}` must map {count} images to logits [{count}, classes >= 2], got {got}")
    return int(logits.shape[1])


def check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be a whole number >= {least}, got {value!r}")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or not (value > 0 and math.isfinite(value)):
            raise ValueError(f"`{name}` must be finite and > 0, got {value!r}")


def check_path(path: Any) -> Path | None:
    """The name of a file, or None."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not Path(path).name:
        raise ValueError(f"`path` must be the name of a file, got {path!r}")
    return Path(path)


def device_of(model: Any, default: torch.device) -> torch.device:
    """The device of a module's first parameter or buffer."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return default
