"""A small network to convert, and what of a model a conversion could disturb."""

import torch
from torch import nn


class Residual(nn.Module):
    """A block with a projection that no name gives away."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.match = nn.Conv2d(inputs, outputs, 1, stride)
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )

    def forward(self, x):
        return self.match(x) + self.body(x)


def small_net(classes=5):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8, 12, 2),
        nn.Conv2d(12, 12, 1),
        nn.BatchNorm2d(12),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, classes),
    )


def images(batch=4, size=10):
    return torch.randn(batch, 3, size, size)


def names(entries):
    return [entry.name for entry in entries]


def state(model):
    """Everything that a conversion could disturb: classes, modes and values."""
    kinds = [(name, type(part), part.training) for name, part in model.named_modules()]
    return kinds, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model, before):
    kinds, values = state(model)
    assert kinds == before[0]
    assert values.keys() == before[1].keys()
    for name, tensor in values.items():
        assert torch.equal(tensor, before[1][name])
