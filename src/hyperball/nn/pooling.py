"""RobustPool1d and RobustPool2d: nn.AvgPool's arguments, and a penalty whose radius and shape may be learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from hyperball.functional.pooling import robust_pool1d, robust_pool2d
from hyperball.functional.pooling_checks import Penalty, Sizes, known_scale, single_penalty, window_sizes
from hyperball.nn.tracing import as_one_call
from hyperball.rows import Value

SHAPE_BOUND = 3.0  # a learned shape lies in (0, 3)
LOG_BOUND = 80.0  # beyond, exp is 0 or infinite in float32
NAMES = {"rho": "c", "shape": "shape"}


def _raw(key: str, value: Tensor) -> Tensor:
    """How a learned parameter is stored: log c; logit(shape/3)."""
    return value.log() if key == "rho" else torch.logit(value / SHAPE_BOUND)


def _read(key: str, raw: Tensor) -> Tensor:
    """c = exp(raw), raw within ±80; shape = 3·sigmoid(raw); in float32 at least."""
    raw = raw.float() if raw.element_size() < 4 else raw
    return raw.clamp(-LOG_BOUND, LOG_BOUND).exp() if key == "rho" else SHAPE_BOUND * torch.sigmoid(raw)


class RobustPool(nn.Module):
    """y = argmin_u Σ_i phi(u − x_i; c) over windows, or over all positions without a kernel size.

    In the penalty's text, ``learn_c`` and ``learn_shape`` make parameters of c (stored as ``log_c``) and shape (stored
    as ``logit_shape``, so that it stays in (0, 3)), one for the layer or, with ``per="channel"``, one for each of
    `channels`. A tensor c is fixed; an ``nn.Parameter`` c is learned as it is, under the name ``c``, and must stay > 0.
    `predict_c` and `predict_shape` are modules that give log c and logit(shape/3) from the input: (N, C) or (N, 1) for
    each sample, or as many dimensions as the output, to which they broadcast.
    With scale="mad", c is in units of each row's median absolute deviation.
    """

    pool: Callable[..., Tensor]
    space: int

    def __init__(
        self,
        kernel_size: Sizes | None = None,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        *,
        penalty: Penalty = "huber",
        ceil_mode: bool = False,
        scale: str | None = None,
        channels: int | None = None,
        predict_c: nn.Module | None = None,
        predict_shape: nn.Module | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        known_scale(scale)
        window_sizes(self.space, kernel_size, stride, padding)
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.scale, self.channels = ceil_mode, scale, channels
        value = single_penalty(penalty)
        _check_options(value, channels)
        self.predict_c, self.predict_shape = predict_c, predict_shape
        self._start: dict[str, float | list[float]] = {}
        self._fixed: list[str] = []
        self._given: list[str] = []
        self._text = str(value).replace("rho", "c")
        self.value = self._store(value, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _store(self, value: Value, factory: dict[str, Any]) -> Value:
        """Make parameters of what is learned and buffers of fixed tensors; returns the value without tensors."""
        plain: dict[str, Any] = {}
        for key, held in value.parameters.items():
            learned = bool(value.options.get(f"learn_{key}", False))
            predicted = getattr(self, f"predict_{NAMES.get(key, '')}", None) is not None
            if learned and predicted:
                raise ValueError(
                    f"`{NAMES[key]}` is either learned or predicted, got learn_{NAMES[key]} and predict_{NAMES[key]}"
                )
            if not isinstance(held, Tensor) and not learned:
                continue
            if isinstance(held, nn.Parameter) or (isinstance(held, Tensor) and held.requires_grad):
                plain[key] = value.row.parameters[key]
                self._adopt(key, held, learned or predicted)
                continue
            per_channel = learned and value.options.get("per", self._per) == "channel"
            start = _check_start(key, held, learned, self.channels if per_channel else None)
            plain[key] = value.row.parameters[key]
            if learned:
                self._start[key] = start.tolist()
                self.register_parameter(_stored(key), nn.Parameter(torch.empty(start.shape, **factory)))
            else:
                self._fixed.append(key)
                self.register_buffer(f"fixed_{NAMES.get(key, key)}", start.to(**factory))
        return value.with_parameters(**plain)

    def _adopt(self, key: str, held: Tensor, decided: bool) -> None:
        """Register a parameter that was given as such: the same object, without a map."""
        name = NAMES.get(key, key)
        if not isinstance(held, nn.Parameter) or decided:
            other = (
                "a tensor that requires a gradient" if not decided else f"a parameter beside learn_ or predict_{name}"
            )
            raise ValueError(f"`{name}` is learned by learn_{name}=True, or given as an nn.Parameter, got {other}")
        _check_start(key, held, False, None)
        self._given.append(key)
        self.register_parameter(name, held)

    @property
    def _per(self) -> str:
        return "layer" if self.channels is None else "channel"

    def reset_parameters(self) -> None:
        """Set what is learned to the values the layer was made with."""
        for key, start in self._start.items():
            raw = getattr(self, _stored(key))
            with torch.no_grad():
                raw.copy_(_raw(key, torch.tensor(start, dtype=torch.float64)).to(raw.dtype))

    def penalty(self, x: Tensor | None = None) -> Value:
        """The penalty with its present parameters; what is predicted is predicted from x."""
        present: dict[str, Tensor] = {key: _read(key, getattr(self, _stored(key))) for key in self._start}
        present |= {key: getattr(self, f"fixed_{NAMES.get(key, key)}") for key in self._fixed}
        present |= {key: getattr(self, NAMES.get(key, key)) for key in self._given}
        for key, module in (("rho", self.predict_c), ("shape", self.predict_shape)):
            if module is not None and x is not None:
                present[key] = _read(key, _on_output(module(x), x, self.space, f"predict_{NAMES[key]}"))
        return self.value.with_parameters(**present)

    def forward(self, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, fx.Proxy):
            return as_one_call(self, x, weights=weights, mask=mask)
        return type(self).pool(
            x,
            self.kernel_size,
            self.stride,
            self.padding,
            penalty=self.penalty(x),
            weights=weights,
            mask=mask,
            ceil_mode=self.ceil_mode,
            scale=self.scale,
        )

    def extra_repr(self) -> str:
        parts = [] if self.kernel_size is None else [f"kernel_size={self.kernel_size}", f"stride={self.stride}"]
        parts += [f"padding={self.padding}"] if self.padding != 0 else []
        parts.append(f"penalty={self._text!r}")
        parts += ["ceil_mode=True"] if self.ceil_mode else []
        parts += [f"scale={self.scale!r}"] if self.scale else []
        parts += [f"channels={self.channels}"] if self.channels else []
        return ", ".join(parts)


def _on_output(predicted: Tensor, x: Tensor, space: int, name: str) -> Tensor:
    """A prediction with the output's dimensions: (N, C), (N, 1) and (1, C) get ones for the positions."""
    batched = x.dim() == space + 2
    if predicted.dim() == x.dim() or predicted.numel() == 1:
        return predicted.reshape(()) if predicted.numel() == 1 else predicted
    lead = tuple(x.shape[:-space])
    fits = all(have in (1, want) for have, want in zip(predicted.shape, lead, strict=False))
    if predicted.dim() != len(lead) or not fits:
        shapes = "(N, C), or (N, 1) for one value a sample" if batched else "(C,)"
        raise ValueError(
            f"`{name}` must give {shapes}, or {x.dim()} dimensions that broadcast to the output, "
            f"got {tuple(predicted.shape)} for an input of {tuple(x.shape)}"
        )
    return predicted.reshape(*predicted.shape, *[1] * space)


def _stored(key: str) -> str:
    return "log_c" if key == "rho" else "logit_shape"


def _check_options(value: Value, channels: int | None) -> None:
    """Refuse what the text may say to a convolution but means nothing to a pooling."""
    if "relative" in value.options:
        raise ValueError("`relative` is for convolutions; for a pooling give scale='mad'")
    for option in value.options:
        if option.startswith("learn_") and option not in ("learn_rho", "learn_shape"):
            raise ValueError(f"`{option}` has no effect on a pooling: the minimum does not depend on it")
    if value.options.get("per") == "channel" and channels is None:
        raise ValueError("`channels` must be given where a parameter is learned per channel")
    if channels is not None and (not isinstance(channels, int) or channels < 1):
        raise ValueError(f"`channels` must be an integer > 0, got {channels!r}")


def _check_start(key: str, held: Any, learned: bool, channels: int | None) -> Tensor:
    """The initial value as a tensor of shape () or (channels,)."""
    start = torch.as_tensor(held, dtype=torch.float64).detach().cpu()
    name = NAMES.get(key, key)
    if start.dim() == 0 and channels is not None:
        start = start.expand(channels)
    if start.dim() > 1 or (start.dim() == 1 and channels is not None and start.numel() != channels):
        raise ValueError(f"`{name}` must be a number or one a channel, got shape {tuple(start.shape)}")
    if key == "rho" and not bool((start > 0).all()):
        raise ValueError(f"`c` must be > 0, got {start.min().item():g}")
    if key == "shape" and learned and not bool(((start > 0) & (start < SHAPE_BOUND)).all()):
        raise ValueError(f"`shape` must be in (0, {SHAPE_BOUND:g}) to be learned, got {start.tolist()}")
    return start.clone()


class RobustPool1d(RobustPool):
    __doc__ = (RobustPool.__doc__ or "") + "\n    Input [N, C, L] or [C, L]; padding holds no samples.\n"
    pool = staticmethod(robust_pool1d)
    space = 1


class RobustPool2d(RobustPool):
    __doc__ = (RobustPool.__doc__ or "") + "\n    Input [N, C, H, W] or [C, H, W]; padding holds no samples.\n"
    pool = staticmethod(robust_pool2d)
    space = 2
