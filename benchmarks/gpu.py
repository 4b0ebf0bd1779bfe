"""Decoupled convolutions on a GPU, bfloat16, channels_last, forward + backward inside a CUDA graph.

    python benchmarks/gpu.py [record.json]

Every operator is timed eagerly and compiled, in the same run as a plain convolution: medians of graph replays.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hyperball as hb

SHAPES = [(512, 64, 32), (512, 96, 32), (512, 192, 16), (512, 384, 8)]
OPERATORS = [("tanh", "cosine"), ("linear", "square_cosine")]
REPLAYS = 30


def replay_ms(step: Callable[[], None]) -> float:
    """The median time of a captured step."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def step_of(layer: Any, parameters: list[Tensor], x: Tensor, grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.grad(layer(x), [x, *parameters], grad)

    return step


def rows() -> list[dict[str, Any]]:
    table = []
    for batch, channels, size in SHAPES:
        x = torch.randn(batch, channels, size, size, device="cuda", dtype=torch.bfloat16)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        grad = torch.randn_like(x)

        def ready(layer: nn.Module) -> nn.Module:
            return layer.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)

        plain = ready(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        plain_ms = replay_ms(step_of(plain, list(plain.parameters()), x, grad))
        for magnitude, angular in OPERATORS:
            layer = ready(hb.nn.DecoupledConv2d(channels, channels, 3, padding=1, magnitude=magnitude, angular=angular))
            for how in ("eager", "compiled"):
                call = torch.compile(layer, fullgraph=True) if how == "compiled" else layer
                ours = replay_ms(step_of(call, list(layer.parameters()), x, grad))
                table.append(
                    {
                        "shape": f"{batch}x{channels}x{size}x{size}",
                        "operator": f"{magnitude} + {angular}",
                        "how": how,
                        "ours_ms": round(ours, 4),
                        "plain_ms": round(plain_ms, 4),
                        "ratio": round(ours / plain_ms, 3),
                    }
                )
    return table


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device")
    table = rows()
    for row in table:
        print(
            "{shape:<16} {operator:<24} {how:<9} {ours_ms:7.3f} ms, plain {plain_ms:.3f} ms, {ratio:.2f}x".format(**row)
        )
    if len(sys.argv) > 1:
        record = {
            "what": __doc__.splitlines()[0] if __doc__ else "",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "hyperball": hb.__version__,
            "replays": REPLAYS,
            "statistic": "median",
            "rows": table,
        }
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
