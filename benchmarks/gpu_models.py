"""CNN-9 and ResNet-32 for timing: plain, decoupled module by module, and decoupled in fused blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import hyperball as hb


class Layers:
    """Makes convolution + BatchNorm + activation: kind "plain", "modules" (one after the other) or "fused"."""

    def __init__(self, kind: str, **operator: Any) -> None:
        self.kind, self.operator = kind, operator

    def __call__(self, inputs: int, outputs: int, stride: int = 1, act: bool = True, carry: bool = False) -> nn.Module:
        if self.kind == "fused":
            options = {"activation": "relu" if act else None, "carry": carry, **self.operator}
            return hb.nn.DecoupledConvBNAct(inputs, outputs, 3, stride, 1, **options)
        make: Any = nn.Conv2d if self.kind == "plain" else hb.nn.DecoupledConv2d
        conv = make(inputs, outputs, 3, stride, 1, bias=False, **({} if self.kind == "plain" else self.operator))
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([nn.ReLU(inplace=True)] if act else []))


class CNN9(nn.Module):
    """Three stages of three 3×3 convolutions (64, 128, 256), each ending in max pooling; FC 512; a classifier."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        inputs = 3
        for width in (64, 128, 256):
            for place in range(3):
                stages.append(layers(inputs, width, carry=place < 2))
                inputs = width
            stages.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*stages, nn.Flatten())
        self.head = nn.Sequential(nn.Linear(256 * 16, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


class Unit(nn.Module):
    """Two convolutions and a shortcut, a plain 1×1 convolution where the size changes; ReLU after the sum."""

    def __init__(self, layers: Layers, inputs: int, outputs: int, stride: int, carry: bool) -> None:
        super().__init__()
        fused = layers.kind == "fused"
        self.first = layers(inputs, outputs, stride, carry=True)
        self.second = layers(outputs, outputs, act=fused, carry=carry)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = None if fused else nn.ReLU(inplace=True)

    def forward(self, given: Any) -> Any:
        x = given[0] if isinstance(given, tuple) else given
        if self.relu is None:
            return self.second(self.first(given), self.shortcut(x))
        return self.relu(self.second(self.first(x)) + self.shortcut(x))


class ResNet32(nn.Module):
    """A 3×3 root of 96 channels, then five units each of 96, 192 and 384 channels, average pooling, a classifier."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.root = layers(3, 96, act=False, carry=True)
        units, inputs = [], 96
        for width in (96, 192, 384):
            for place in range(5):
                stride = 2 if place == 0 and inputs != width else 1
                last = width == 384 and place == 4
                units.append(Unit(layers, inputs, width, stride, not last))
                inputs = width
        self.units = nn.Sequential(*units)
        self.classifier = nn.Linear(384, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.units(self.root(x)).mean((2, 3)))
        return out


MODELS: dict[str, Any] = {"cnn9": CNN9, "resnet32": ResNet32}
