"""What our models have in common: features, a classifier that may be exchanged, and the names that timm asks for."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hyperball.models.layers import Layers, normal_weights


class Classified(nn.Module):
    """y = classifier(dropout(features)), with `drop_rate` 0 unless it is set."""

    head_name = "classifier"

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.0

    def add_classifier(self, layers: Layers, features: int, num_classes: int) -> None:
        """Make the classifier, and remember how, so that it can be made for another number of classes."""
        self.num_features, self.num_classes = features, num_classes
        self.head_bias, self.head_projection = layers.classifier_bias, layers.projection
        self.head_normalized = layers.classifier_normalized
        self.add_module(self.head_name, layers.classifier(features, num_classes))

    def get_classifier(self) -> nn.Module:
        return self.get_submodule(self.head_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A classifier with random weights for another number of classes; none at all for 0."""
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
            raise ValueError(f"`num_classes` must be a whole number >= 0, got {num_classes!r}")
        if global_pool is not None:
            raise ValueError(f"`global_pool` cannot be changed, got {global_pool!r}; create the model with `pool`")
        made: nn.Module = nn.Identity()
        if num_classes:
            layers = Layers(
                classifier_bias=self.head_bias,
                projection=self.head_projection,
                classifier_normalized=self.head_normalized,
            )
            made = layers.classifier(self.num_features, num_classes)
            normal_weights(made)
        like = next(self.parameters())
        self.add_module(self.head_name, made.to(like.device, like.dtype).train(self.training))
        self.num_classes = num_classes

    def forward_features(self, x: Tensor) -> Tensor:
        """The features that the classifier is given, [B, features]."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of what `forward_features` gives; with `pre_logits` that itself, after dropout."""
        x = F.dropout(x, self.drop_rate, self.training) if self.drop_rate else x
        y: Tensor = x if pre_logits else self.get_submodule(self.head_name)(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))
