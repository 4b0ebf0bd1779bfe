"""Small models for the tests of freezing, and what brings them into a state worth freezing."""

import torch
from torch import nn

from hyperball import nn as C


def scrambled(model, dtype=torch.float64):
    """The model with random parameters, radii and statistics, a negative scale among them, in evaluation mode."""
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_var", "running_length")):
                buffer.copy_(1.0 + torch.rand_like(buffer))
            elif name.endswith("running_mean"):
                buffer.normal_()
        for part in model.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.affine:
                part.weight[0] = -1.5
    return model.eval()


def batch(*shape, dtype=torch.float64):
    x = torch.randn(*shape, dtype=dtype)
    x[0] = 0.0  # zero patches
    return x


def folded(model):
    return {layer.name: layer.folded for layer in model.freeze_report.layers}


def small(**operator):
    """Convolution, BatchNorm, ReLU, pooling, classifier."""
    return nn.Sequential(
        C.DecoupledConv2d(3, 8, 3, padding=1, **operator), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), C.NormalizedLinear(8, 5),
    )  # fmt: skip


class Residual(nn.Module):
    """A block with a shortcut and optional arguments."""

    def __init__(self, channels=4):
        super().__init__()
        self.conv1, self.bn1 = C.DecoupledConv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2 = C.DecoupledConv2d(channels, channels, 3, padding=1, angular="square_cosine")
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x, mask=None, double=False):
        if mask is not None:
            x = x * mask
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return 2 * (x + y) if double else x + y


class Branching(nn.Module):
    """A forward that cannot be traced, around a block and a sequence that can."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(C.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.last, self.last_bn = C.DecoupledConv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if x.mean() < 100 else x
        return self.last_bn(self.last(x))


class Tapped(nn.Module):
    """Both the convolution's output and BatchNorm's are used."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = C.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return y + self.bn(y)


class Variety(nn.Module):
    """One of each kind, for exporters."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = C.DecoupledConv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped = C.DecoupledConv2d(8, 8, 3, groups=2, angular="square_cosine", weighting="linear", bias=True)
        self.grouped_bn = nn.BatchNorm2d(8)
        self.up, self.up_bn = C.DecoupledConvTranspose2d(8, 4, 3, 2, weighting="joint"), nn.BatchNorm2d(4)
        self.head, self.logits = C.DecoupledLinear(4, 6, magnitude="linear + ball"), C.NormalizedLinear(6, 5)

    def forward(self, x):
        x = self.grouped_bn(self.grouped(torch.relu(self.bn(self.conv(x)))))
        return self.logits(self.head(torch.relu(self.up_bn(self.up(x))).mean((2, 3))))
