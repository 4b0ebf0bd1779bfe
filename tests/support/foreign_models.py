"""Small models of torchvision, of timm and of torch's own modules, each made when it is asked for."""

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


def torchvision_units():
    blocks = pytest.importorskip("torchvision.models.resnet")
    shortcut = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8))
    units = [blocks.BasicBlock(3, 8, downsample=shortcut), blocks.Bottleneck(8, 2)]
    return nn.Sequential(*units, nn.Flatten(), nn.Linear(128, 5))


def timm_units():
    blocks = pytest.importorskip("timm.models.resnet")
    units = [blocks.Bottleneck(16, 4), blocks.BasicBlock(16, 16)]
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    return nn.Sequential(first, *units, nn.Flatten(), nn.Linear(256, 5))


def sequence():
    parts = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False)]
    return nn.Sequential(*parts, nn.BatchNorm2d(8), nn.ReLU6(), nn.Flatten(), nn.Linear(32, 5))
