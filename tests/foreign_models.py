"""Small models of torchvision and timm, each made when it is asked for."""

import pytest
from torch import nn


def of_torchvision(make):
    return lambda: make(pytest.importorskip("torchvision.models"))


def of_timm(name):
    return lambda: pytest.importorskip("timm").create_model(name, num_classes=5)


def vgg(vision):
    layers = vision.vgg.make_layers([8, "M", 8], batch_norm=True)
    return nn.Sequential(layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


FAMILIES = {
    "torchvision basic": of_torchvision(lambda v: v.ResNet(v.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)),
    "torchvision bottleneck": of_torchvision(lambda v: v.ResNet(v.resnet.Bottleneck, [1, 1, 1, 1], num_classes=5)),
    "torchvision vgg": of_torchvision(vgg),
    "torchvision mobilenet": of_torchvision(lambda v: v.mobilenet_v2(num_classes=5, width_mult=0.25)),
    "timm resnet": of_timm("resnet10t"),
    "timm seresnet": of_timm("seresnet18"),
}
