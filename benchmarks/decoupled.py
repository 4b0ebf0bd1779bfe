"""Decoupled convolutions against nn.Conv2d in the same run: time forward and backward, and what the backward keeps."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import hyperball as hb

BATCH, CHANNELS, SIZE = 32, 64, 32
TARGET = "<= 2.0"
OPERATORS = [
    ("tanh", "cosine", "none"),
    ("tanh(per='layer')", "cosine", "none"),
    ("ball", "cosine", "none"),
    ("seg", "cosine", "none"),
    ("sphere", "cosine", "none"),
    ("log", "cosine", "none"),
    ("linear", "cosine", "none"),
    ("barron", "cosine", "none"),
    ("tanh", "cosine", "joint"),
    ("linear", "square_cosine", "none"),
    ("tanh", "square_cosine", "none"),
    ("tanh", "linear", "none"),
]


class NaiveTanhConv2d(nn.Conv2d):
    """What one would write first: unit filters, the norm by a ones-convolution, a radius per channel, autograd."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.ratio = nn.Parameter(torch.ones(self.out_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        unit = self.weight / self.weight.flatten(1).norm(dim=1)[:, None, None, None]
        n = torch.sqrt(nn.functional.conv2d(x * x, torch.ones_like(self.weight), padding=1) + 1e-4)
        return torch.tanh(n / (self.ratio**2 * n.mean())) * (nn.functional.conv2d(x, unit, padding=1) / n)


def seconds(layer: nn.Module, x: Tensor, grad: Tensor) -> float:
    start = time.perf_counter()
    layer(x).backward(grad)
    return time.perf_counter() - start


def kept_maps(layer: nn.Module, x: Tensor) -> float:
    """What the forward keeps for the backward beside input and parameters, in activation maps."""
    outside = {x.untyped_storage().data_ptr(), *(p.untyped_storage().data_ptr() for p in layer.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    return sum(kept.values()) / out.untyped_storage().nbytes()


def compare(name: str, layer: nn.Module, repeats: int = 9) -> dict[str, Any]:
    """The median over alternating runs of the layer and of a plain convolution."""
    layout = torch.channels_last
    plain = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False).to(memory_format=layout)
    layer = layer.to(memory_format=layout)
    x = torch.randn(BATCH, CHANNELS, SIZE, SIZE).contiguous(memory_format=layout).requires_grad_()
    grad = torch.randn(BATCH, CHANNELS, SIZE, SIZE).contiguous(memory_format=layout)
    times: dict[nn.Module, list[float]] = {plain: [], layer: []}
    for _ in range(repeats + 2):
        for module in times:
            times[module].append(seconds(module, x, grad))
    reference, ours = (1e3 * sorted(times[module][2:])[repeats // 2] for module in (plain, layer))
    maps = kept_maps(layer, x)
    return {
        "name": name,
        "ours_ms": ours,
        "reference_ms": reference,
        "ratio": ours / reference,
        "target": TARGET,
        "kept": maps,
    }


def operator(magnitude: str, angular: str, weighting: str) -> tuple[str, nn.Module]:
    name = f"{magnitude} + {angular}" + ("" if weighting == "none" else f", {weighting}")
    options = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
    return name, hb.nn.DecoupledConv2d(CHANNELS, CHANNELS, 3, padding=1, **options)


def rows() -> list[dict[str, Any]]:
    """One row an operator: name, ours_ms, reference_ms, ratio (ours / reference), target, kept (in activation maps)."""
    threads = torch.get_num_threads()
    name, layer = operator(*OPERATORS[0])
    table = [compare(f"{name}, {threads} threads", layer)]
    torch.set_num_threads(1)  # the ratio then holds on a busy machine too
    try:
        table += [compare(*operator(*given)) for given in OPERATORS]
        naive = compare("naive tanh + cosine, for scale", NaiveTanhConv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False))
        return [*table, {**naive, "target": ""}]
    finally:
        torch.set_num_threads(threads)
