"""A converted, frozen ResNet-18 (tanh + cosine, BatchNorm folded) against torchvision's in evaluation mode."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import hyperball as hb

TARGET = "<= 1.25"
CASES = [(1, torch.contiguous_format), (8, torch.contiguous_format), (8, torch.channels_last)]


def networks() -> tuple[nn.Module, nn.Module]:
    """torchvision's ResNet-18, and its frozen conversion with radii that differ from channel to channel."""
    torch.manual_seed(0)
    plain = hb.models.create("torchvision/resnet18").eval()
    converted, _ = hb.convert_model(plain, magnitude="tanh", angular="cosine")
    for part in converted.modules():
        if isinstance(part, hb.nn.DecoupledConv2d):
            nn.init.uniform_(part.magnitude.ratio, 0.8, 1.2)
    hb.convert.calibrate(converted, [torch.randn(4, 3, 64, 64)])
    frozen = hb.freeze(converted)
    assert sum(layer.folded is not None for layer in frozen.freeze_report.layers) == 17
    return plain, frozen


def seconds(model: nn.Module, x: Tensor) -> float:
    start = time.perf_counter()
    model(x)
    return time.perf_counter() - start


def compare(batch: int, layout: torch.memory_format, repeats: int) -> dict[str, Any]:
    """The median over alternating runs."""
    plain, frozen = (model.to(memory_format=layout) for model in networks())
    x = torch.randn(batch, 3, 224, 224).contiguous(memory_format=layout)
    times: dict[nn.Module, list[float]] = {plain: [], frozen: []}
    with torch.inference_mode():
        for _ in range(repeats + 2):
            for model in times:
                times[model].append(seconds(model, x))
    reference, ours = (1e3 * sorted(times[model][2:])[repeats // 2] for model in (plain, frozen))
    name = f"batch {batch}, {'channels_last' if layout == torch.channels_last else 'contiguous'}"
    return {"name": name, "ours_ms": ours, "reference_ms": reference, "ratio": ours / reference, "target": TARGET}


def rows(repeats: int = 9) -> list[dict[str, Any]]:
    """One row a batch size and memory layout: name, ours_ms, reference_ms, ratio (ours / reference), target."""
    threads = torch.get_num_threads()
    first = compare(*CASES[0], repeats)
    torch.set_num_threads(1)  # the ratio then holds on a busy machine too
    try:
        table = [compare(batch, layout, repeats) for batch, layout in CASES]
    finally:
        torch.set_num_threads(threads)
    return [{**first, "name": f"{first['name']}, {threads} threads"}, *table]


if __name__ == "__main__":
    for row in rows():
        print(f"{row['name']:<32} ours {row['ours_ms']:7.1f} ms, torchvision {row['reference_ms']:7.1f} ms, "
              f"ratio {row['ratio']:.2f} ({row['target']})")  # fmt: skip
