"""Residual networks: ResNet-32 for 32×32 images, ResNet-18 with torchvision's names, and the authors' modified one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hyperball.models.classified import Classified
from hyperball.models.layers import Layers, normal_weights
from hyperball.nn.fused import Parts
from hyperball.nn.fused_chain import Chained, Residual
from hyperball.rows import nearest

STEMS = ("imagenet", "cifar")


class Unit(Residual, nn.Module):
    """act(norm(conv(act(norm(conv(x))))) + shortcut(x)); the last activation is optional.

    The shortcut is a plain 1×1 convolution with normalization where the number of channels or the size changes.
    """

    def __init__(self, layers: Layers, inputs: int, outputs: int, stride: int, last: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = layers.conv2d(inputs, outputs, 3, stride), layers.norm2d(outputs)
        self.relu = layers.act(outputs)
        self.conv2, self.bn2 = layers.conv2d(outputs, outputs, 3), layers.norm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.downsample = layers.shortcut(inputs, outputs, stride) if changes else None
        self.relu2 = layers.act(outputs) if last else nn.Identity()

    def blocks(self) -> list[Parts]:
        return [(self.conv1, self.bn1, self.relu), (self.conv2, self.bn2, self.relu2)]

    def shortcut(self) -> nn.Module | None:
        return self.downsample

    def in_turn(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu2(y + shortcut)
        return out


class ResNet(Chained, Classified):
    """A stem, stages of residual units, global average pooling and a plain classifier."""

    head_name = "fc"

    def __init__(
        self, layers: Layers, num_classes: int, stem: Sequence[nn.Module], stages: Sequence[nn.Module], features: int
    ) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool = stem
        self.stages = len(stages)
        for index, stage in enumerate(stages, 1):
            self.add_module(f"layer{index}", stage)
        self.avgpool = layers.global_pool()
        self.add_classifier(layers, features, num_classes)
        normal_weights(self)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features that the classifier is given, [B, features]."""
        pooled: Tensor = self.avgpool(self.run_chained(x))
        return pooled.flatten(1)

    def chained(self) -> list[nn.Module]:
        stages = [self.get_submodule(f"layer{index}") for index in range(1, self.stages + 1)]
        return [self.conv1, self.bn1, self.relu, self.maxpool, *stages]


def units(layers: Layers, inputs: int, outputs: int, count: int, stride: int, last: bool = True) -> list[nn.Module]:
    first = [Unit(layers, inputs, outputs, stride, last)]
    return [*first, *(Unit(layers, outputs, outputs, 1, last) for _ in range(count - 1))]


def imagenet_stem(layers: Layers, in_channels: int, width: int, stem: str) -> list[nn.Module]:
    """7×7, stride 2 and 3×3 max pooling, stride 2; for 32×32 images a 3×3 convolution alone."""
    if stem not in STEMS:
        raise ValueError(f"`stem` must be one of {STEMS}, got {stem!r}; {nearest(str(stem), STEMS)}")
    small = stem == "cifar"
    conv = layers.conv2d(in_channels, width, 3 if small else 7, 1 if small else 2)
    pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
    return [conv, layers.norm2d(width), layers.act(width), pool]


def resnet32(layers: Layers, num_classes: int, *, in_channels: int = 3, width: int = 96) -> nn.Module:
    """ResNet-32: 3×3, 96 without activation; five units each of 96, 192 and 384 channels."""
    stem = [layers.conv2d(in_channels, width, 3), layers.norm2d(width), nn.Identity(), nn.Identity()]
    widths = (width, 2 * width, 4 * width)
    stages = [nn.Sequential(*units(layers, widths[max(i - 1, 0)], widths[i], 5, 1 if i == 0 else 2)) for i in range(3)]
    return ResNet(layers, num_classes, stem, stages, widths[-1])


def resnet18(
    layers: Layers, num_classes: int, *, in_channels: int = 3, width: int = 64, stem: str = "imagenet"
) -> nn.Module:
    """ResNet-18: two units each of 64, 128, 256 and 512 channels; parameters have torchvision's names."""
    widths = [width * 2**i for i in range(4)]
    stages = [nn.Sequential(*units(layers, widths[max(i - 1, 0)], widths[i], 2, 1 if i == 0 else 2)) for i in range(4)]
    return ResNet(layers, num_classes, imagenet_stem(layers, in_channels, width, stem), stages, widths[-1])


def resnet18_modified(
    layers: Layers, num_classes: int, *, in_channels: int = 3, width: int = 128, stem: str = "imagenet"
) -> nn.Module:
    """Modified ResNet-18: a 3×3 convolution of stride 2 begins each stage, then 1, 2, 3 and 0 units; no 1×1 shortcuts.

    As in the authors' code, nothing follows the sum of a unit.
    """
    widths = [width * 2**i for i in range(4)]
    stages = []
    inputs = width
    for outputs, count in zip(widths, (1, 2, 3, 0), strict=True):
        entry = [layers.conv2d(inputs, outputs, 3, 2), layers.norm2d(outputs), layers.act(outputs)]
        rest = units(layers, outputs, outputs, count, 1, last=False) if count else []
        stages.append(nn.Sequential(*entry, *rest))
        inputs = outputs
    return ResNet(layers, num_classes, imagenet_stem(layers, in_channels, width, stem), stages, widths[-1])
