"""PointNet without transforms, and a small one: the same map at every point, a pooling over points, a classifier."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hyperball.models.classified import Classified
from hyperball.models.layers import Layers


class PointNet(Classified):
    """Shared maps over [B, N, 3] points, a pooling over the points, fully connected layers and a classifier.

    Every shared map has normalization and activation, the last one normalization alone. Dropout comes before the
    normalization of the last fully connected layer.
    """

    def __init__(
        self,
        layers: Layers,
        num_classes: int,
        shared: Sequence[int],
        connected: Sequence[int],
        in_channels: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must be in [0, 1), got {dropout!r}")
        self.in_channels = in_channels
        maps: list[nn.Module] = []
        inputs = in_channels
        for outputs in shared:
            maps += [layers.pointwise(inputs, outputs), layers.norm1d(outputs), layers.act(outputs)]
            inputs = outputs
        self.shared = nn.Sequential(*maps[:-1])
        self.pool = layers.point_pool()
        dense: list[nn.Module] = []
        for index, outputs in enumerate(connected, 1):
            drop = [nn.Dropout(dropout)] if dropout and index == len(connected) else []
            dense += [nn.Linear(inputs, outputs), *drop, layers.norm1d(outputs), layers.act(outputs)]
            inputs = outputs
        self.connected = nn.Sequential(*dense)
        self.add_classifier(layers, inputs, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features that the classifier is given, [B, features]."""
        # A proxy of torch.fx has no shape to look at.
        if isinstance(x, Tensor) and (x.dim() != 3 or x.shape[2] != self.in_channels):
            raise ValueError(f"`x` must be points [batch, number, {self.in_channels}], got shape {tuple(x.shape)}")
        y: Tensor = self.connected(self.pool(self.shared(x.transpose(1, 2))))
        return y


def pointnet(layers: Layers, num_classes: int, *, in_channels: int = 3, dropout: float = 0.3) -> nn.Module:
    """PointNet without transforms: shared 3-64-128-1024, pooling, FC 512-256, dropout 0.3."""
    return PointNet(layers, num_classes, (64, 128, 1024), (512, 256), in_channels, dropout)


def points(layers: Layers, num_classes: int, *, in_channels: int = 3, dropout: float = 0.0) -> nn.Module:
    """A small PointNet: shared 3-32-64, pooling, FC 32."""
    return PointNet(layers, num_classes, (32, 64), (32,), in_channels, dropout)
