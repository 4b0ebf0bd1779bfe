"""Chains of convolutions: CNN-9, its narrower form for attacks, two-dimensional features, and a network for digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hyperball.models.classified import Classified
from hyperball.models.layers import Layers, normal_weights
from hyperball.nn.fused_chain import Chained


def block(layers: Layers, inputs: int, outputs: int, depth: int) -> nn.Sequential:
    """[3×3 convolution, normalization, activation] × depth."""
    parts: list[nn.Module] = []
    for index in range(depth):
        conv = layers.conv2d(inputs if index == 0 else outputs, outputs, 3)
        parts += [conv, layers.norm2d(outputs), layers.act(outputs)]
    return nn.Sequential(*parts)


class Chain(Chained, Classified):
    """Blocks of convolutions with pooling between them, a layer of features, and a plain classifier.

    Without a `feature_norm` the features are what the fully connected layer gives: the two-dimensional ones of the
    papers' figures.
    """

    def __init__(
        self,
        layers: Layers,
        num_classes: int,
        *,
        in_channels: int,
        image_size: int,
        widths: Sequence[int],
        features: int,
        feature_norm: bool = True,
    ) -> None:
        super().__init__()
        check_image_size(image_size, 2 ** len(widths))
        stages = []
        inputs = in_channels
        for width in widths:
            stages += [block(layers, inputs, width, 3), layers.max_pool(2, 2)]
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.fc = layers.linear(inputs * (image_size // 2 ** len(widths)) ** 2, features)
        after = [layers.norm1d(features), layers.act(features)] if feature_norm else []
        self.after = nn.Sequential(*after)
        self.add_classifier(layers, features, num_classes)
        normal_weights(self)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features that the classifier is given, [B, features]."""
        y: Tensor = self.after(self.fc(self.run_chained(x).flatten(1)))
        return y

    def chained(self) -> list[nn.Module]:
        return [self.stages]


class Digits(Chained, Classified):
    """Three convolutions, max pooling after two of them, global pooling and a classifier, for small images."""

    def __init__(self, layers: Layers, num_classes: int, in_channels: int, width: int) -> None:
        super().__init__()
        parts = [block(layers, in_channels, width, 1), block(layers, width, 2 * width, 1), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*parts, block(layers, 2 * width, 4 * width, 1))
        self.pool = layers.global_pool()
        self.add_classifier(layers, 4 * width, num_classes)
        normal_weights(self)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features that the classifier is given, [B, features]."""
        y: Tensor = self.pool(self.run_chained(x)).flatten(1)
        return y

    def chained(self) -> list[nn.Module]:
        return [self.stages]


def check_image_size(image_size: int, least: int) -> None:
    if not isinstance(image_size, int) or image_size < least:
        raise ValueError(f"`image_size` must be a whole number >= {least}, got {image_size!r}")


def cnn9(
    layers: Layers,
    num_classes: int,
    *,
    in_channels: int = 3,
    image_size: int = 32,
    features: int = 512,
    width: int = 64,
) -> nn.Module:
    """CNN-9: [3×3, 64]×3, [3×3, 128]×3, [3×3, 256]×3, each with 2×2 pooling, then FC 512; `width` is the first's."""
    geometry: dict[str, Any] = {"in_channels": in_channels, "image_size": image_size, "features": features}
    return Chain(layers, num_classes, widths=(width, 2 * width, 4 * width), **geometry)


def cnn9_adv(
    layers: Layers, num_classes: int, *, in_channels: int = 3, image_size: int = 32, features: int = 256
) -> nn.Module:
    """CNN-9 for attacks: [3×3, 32]×3, [3×3, 64]×3, [3×3, 128]×3, each with 2×2 pooling, then FC 256."""
    geometry: dict[str, Any] = {"in_channels": in_channels, "image_size": image_size, "features": features}
    return Chain(layers, num_classes, widths=(32, 64, 128), **geometry)


def cnn9_features(
    layers: Layers, num_classes: int, *, in_channels: int = 1, image_size: int = 28, features: int = 2, width: int = 32
) -> nn.Module:
    """CNN-9 for attacks with two-dimensional features and nothing behind them, for pictures of MNIST."""
    geometry: dict[str, Any] = {"in_channels": in_channels, "image_size": image_size, "features": features}
    return Chain(layers, num_classes, widths=(width, 2 * width, 4 * width), feature_norm=False, **geometry)


def digits(layers: Layers, num_classes: int, *, in_channels: int = 1, width: int = 16) -> nn.Module:
    """Three 3×3 convolutions of 16, 32 and 64 channels and global pooling, for 8×8 images."""
    return Digits(layers, num_classes, in_channels, width)
