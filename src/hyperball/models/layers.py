"""The layers that models are built of: one choice of operator, normalization, activation and pooling for a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.convert.heads import ProjectedLinear, parse_projection
from hyperball.functional.batch_norm import check_penalty
from hyperball.functional.decoupled import check_weighting
from hyperball.nn.batch_norm import RobustBatchNorm1d, RobustBatchNorm2d
from hyperball.nn.decoupled import DecoupledConv1d, DecoupledConv2d, DecoupledLinear, NormalizedLinear
from hyperball.nn.pooling import RobustPool1d, RobustPool2d
from hyperball.rows import AnyValue, Row, Value, nearest

NORMS = ("batch", "robust")
ACTIVATIONS = ("relu", "prelu")
POINT_POOLS = ("max", "mean", "median")


@dataclass(frozen=True)
class Layers:
    """Makes the layers of one model.

    Args:
        magnitude: The operator's magnitude; None gives torch's own layers, the plain baseline.
        angular, weighting: As in `hyperball.nn.DecoupledConv2d`; without effect where `magnitude` is None.
        norm: "batch", "robust" (RobustBatchNorm) or None.
        activation: "relu", "prelu" (per channel, 0 at the start, which is ReLU) or None.
        pool: None is the model's own pooling; a penalty's text or value puts a robust pooling in its place.
        projection: A text such as "l2_ball(radius=15)" puts BatchNorm1d(affine=False) and that projection before the
            classifier.
        bias: Whether convolutions have a bias.
        classifier_bias: Whether the classifier has one.
        classifier_normalized: Whether the classifier's weights count by their direction alone (`NormalizedLinear`).
        norm_eps, norm_momentum: Those of the normalization layers; Decoupled Networks' authors use 1e-3 and 0.001.
        norm_penalty: That of norm="robust", such as "huber(c=2)"; None is the layer's own.
    """

    magnitude: str | AnyValue | Row | None = None
    angular: str | Value | Row = "cosine"
    weighting: str = "none"
    norm: str | None = "batch"
    activation: str | None = "relu"
    pool: Any = None
    projection: str | None = None
    bias: bool = False
    classifier_bias: bool = False
    classifier_normalized: bool = False
    norm_eps: float = 1e-5
    norm_momentum: float | None = 0.1
    norm_penalty: str | AnyValue | Row | None = None

    def __post_init__(self) -> None:
        h = radial_table.parse("linear" if self.magnitude is None else self.magnitude)
        angular_table.parse(self.angular)
        check_weighting(self.weighting, h)
        _one_of("norm", self.norm, NORMS)
        _one_of("activation", self.activation, ACTIVATIONS)
        for name in ("bias", "classifier_bias", "classifier_normalized"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}")
        if not _is_number(self.norm_eps) or not 0 < self.norm_eps < math.inf:
            raise ValueError(f"`norm_eps` must be a number > 0, got {self.norm_eps!r}")
        if self.norm_momentum is not None and (not _is_number(self.norm_momentum) or not 0 <= self.norm_momentum <= 1):
            raise ValueError(f"`norm_momentum` must be None or a number in [0, 1], got {self.norm_momentum!r}")
        if self.norm_penalty is not None:
            if self.norm != "robust":
                raise ValueError(f"`norm_penalty` goes with norm='robust', got norm={self.norm!r}")
            check_penalty(self.norm_penalty)
        if _is_number(self.pool) or isinstance(self.pool, bool | tuple | list | dict):
            raise TypeError(f"`pool` must be None, a penalty such as 'huber(c=1)' or its value, got {self.pool!r}")
        if self.projection is not None:
            parse_projection(self.projection)
        if self.classifier_normalized and (self.projection is not None or self.classifier_bias):
            raise ValueError("`classifier_normalized` goes with neither `projection` nor `classifier_bias`")

    @property
    def _operator(self) -> dict[str, Any]:
        return {"magnitude": self.magnitude, "angular": self.angular, "weighting": self.weighting}

    def conv2d(self, inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
        """A convolution that keeps the image size, up to the stride."""
        geometry = (inputs, outputs, size, stride, size // 2)
        if self.magnitude is None:
            return nn.Conv2d(*geometry, bias=self.bias)
        return DecoupledConv2d(*geometry, bias=self.bias, **self._operator)

    def pointwise(self, inputs: int, outputs: int) -> nn.Module:
        """The same map at every point, [B, C, N]."""
        if self.magnitude is None:
            return nn.Conv1d(inputs, outputs, 1, bias=self.bias)
        return DecoupledConv1d(inputs, outputs, 1, bias=self.bias, **self._operator)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        if self.magnitude is None:
            return nn.Linear(inputs, outputs, self.bias)
        return DecoupledLinear(inputs, outputs, self.bias, **self._operator)

    def shortcut(self, inputs: int, outputs: int, stride: int) -> nn.Module:
        """The plain 1×1 convolution of a residual shortcut, with normalization."""
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), self.norm2d(outputs))

    def norm2d(self, channels: int) -> nn.Module:
        return self._norm(channels, nn.BatchNorm2d, RobustBatchNorm2d)

    def norm1d(self, channels: int) -> nn.Module:
        return self._norm(channels, nn.BatchNorm1d, RobustBatchNorm1d)

    def _norm(self, channels: int, plain: Any, robust: Any) -> nn.Module:
        if self.norm is None:
            return nn.Identity()
        options = {} if self.norm_penalty is None else {"penalty": self.norm_penalty}
        kind = plain if self.norm == "batch" else robust
        made: nn.Module = kind(channels, eps=self.norm_eps, momentum=self.norm_momentum, **options)
        return made

    def act(self, channels: int) -> nn.Module:
        if self.activation is None:
            return nn.Identity()
        return nn.ReLU(inplace=True) if self.activation == "relu" else nn.PReLU(channels, init=0.0)

    def max_pool(self, size: int, stride: int, padding: int = 0) -> nn.Module:
        """The max pooling of a network without global pooling; robust windows where a penalty is given."""
        if self.pool is None:
            return nn.MaxPool2d(size, stride, padding)
        return RobustPool2d(size, stride, padding, penalty=self.pool)

    def global_pool(self) -> nn.Module:
        """[B, C, H, W] to [B, C, 1, 1]."""
        return nn.AdaptiveAvgPool2d(1) if self.pool is None else RobustPool2d(penalty=self.pool)

    def point_pool(self) -> nn.Module:
        """[B, C, N] to [B, C]."""
        if self.pool in POINT_POOLS:
            return PoolPoints(self.pool)
        try:
            return nn.Sequential(RobustPool1d(penalty=self.pool), nn.Flatten())
        except (TypeError, ValueError) as error:
            raise type(error)(f"`pool` must be one of {', '.join(POINT_POOLS)} or a penalty: {error}") from None

    def classifier(self, features: int, num_classes: int) -> nn.Module:
        if self.classifier_normalized:
            return NormalizedLinear(features, num_classes)
        if self.projection is None:
            return nn.Linear(features, num_classes, self.classifier_bias)
        return ProjectedLinear(features, num_classes, self.classifier_bias, projection=self.projection)


class PoolPoints(nn.Module):
    """The largest, the mean or the (lower) median value of every channel over the points, [B, C, N] to [B, C]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "median":
            return x.median(-1).values
        return x.amax(-1) if self.kind == "max" else x.mean(-1)

    def extra_repr(self) -> str:
        return self.kind


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _one_of(name: str, given: str | None, known: tuple[str, ...]) -> None:
    if given is not None and given not in known:
        raise ValueError(f"`{name}` must be one of {known} or None, got {given!r}; {nearest(str(given), known)}")


@torch.no_grad()
def normal_weights(model: nn.Module) -> None:
    """w ~ N(0, 2/fan_in) for every convolution and linear layer, and zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
            module.weight.normal_(std=math.sqrt(2.0 / module.weight[0].numel()))
            if module.bias is not None:
                module.bias.zero_()
