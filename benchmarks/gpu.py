"""Decoupled convolutions and networks on a GPU against plain ones, forward + backward inside CUDA graphs.

    python benchmarks/gpu.py [record.json] [--only op|train]

Every number is the median of graph replays, with the 20th and 80th percentile, in one run with its plain reference:
bfloat16, channels_last. A training step is autocast over float32 parameters, cross entropy and SGD with momentum.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_models import MODELS, Layers
from torch import Tensor, nn

import hyperball as hb

SHAPES = [(512, 64, 32), (512, 96, 32), (512, 192, 16), (512, 384, 8)]
OPERATORS = [("tanh", "cosine"), ("linear", "square_cosine")]
STEPS = [("cnn9", 512), ("cnn9", 128), ("resnet32", 512), ("resnet32", 128)]
REPLAYS = 30


def replay_times(step: Callable[[], None]) -> list[float]:
    """The times of a captured step, in ms, sorted."""
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
    return sorted(times)


def replay_ms(step: Callable[[], None]) -> float:
    """The median time of a captured step."""
    return statistics.median(replay_times(step))


def eager_ms(step: Callable[[], None]) -> float:
    """The median time of a step that Python launches, kernel by kernel."""
    times = []
    for _ in range(REPLAYS + 3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def step_of(layer: Any, parameters: list[Tensor], x: Tensor, grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.grad(layer(x), [x, *parameters], grad)

    return step


def measured(step: Callable[[], None]) -> dict[str, float]:
    times = replay_times(step)
    names = ("ms", "p20_ms", "p80_ms")
    places = (len(times) // 2, len(times) // 5, 4 * len(times) // 5)
    return {name: round(times[place], 4) for name, place in zip(names, places, strict=True)}


def op_rows() -> list[dict[str, Any]]:
    """One row a shape and operator: forward + backward of the layer over those of a plain convolution."""
    table = []
    for batch, channels, size in SHAPES:
        x = torch.randn(batch, channels, size, size, device="cuda", dtype=torch.bfloat16)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        grad = torch.randn_like(x)

        def ready(layer: nn.Module) -> nn.Module:
            return layer.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)

        plain = ready(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        plain_step = step_of(plain, list(plain.parameters()), x, grad)
        reference, unhurried = measured(plain_step), eager_ms(plain_step)
        for magnitude, angular in OPERATORS:
            layer = ready(hb.nn.DecoupledConv2d(channels, channels, 3, padding=1, magnitude=magnitude, angular=angular))
            step = step_of(layer, list(layer.parameters()), x, grad)
            ours = measured(step)
            table.append(
                {
                    "shape": f"{batch}x{channels}x{size}x{size}",
                    "operator": f"{magnitude} + {angular}",
                    "kernel": hb.explain(layer)["kernel"].split(":")[0],
                    **ours,
                    "plain_ms": reference["ms"],
                    "ratio": round(ours["ms"] / reference["ms"], 3),
                    "ratio_without_graph": round(eager_ms(step) / unhurried, 3),
                }
            )
    return table


def training_step(model: nn.Module, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    x = torch.randn(batch, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(model(x).float(), labels)
        loss.backward()
        optimizer.step()

    return step


def train(name: str, batch: int, layers: Layers, compiled: bool = False) -> dict[str, float]:
    """Time of a training step, and the peak of its memory over what was allocated before the model."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = MODELS[name](layers).cuda().to(memory_format=torch.channels_last).train()
    step = training_step(torch.compile(model) if compiled else model, batch)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {**measured(step), "peak_mib": round(peak, 1)}


def train_rows() -> list[dict[str, Any]]:
    """One row a model, batch and operator: a step in fused blocks over a plain step, eager and compiled."""
    table = []
    for name, batch in STEPS:
        plain = train(name, batch, Layers("plain"))
        compiled = train(name, batch, Layers("plain"), compiled=True)
        for magnitude, angular in OPERATORS:
            ours = train(name, batch, Layers("fused", magnitude=magnitude, angular=angular))
            table.append(
                {
                    "model": name,
                    "batch": batch,
                    "operator": f"{magnitude} + {angular}",
                    **ours,
                    "plain_ms": plain["ms"],
                    "ratio": round(ours["ms"] / plain["ms"], 3),
                    "plain_compiled_ms": compiled["ms"],
                    "ratio_to_compiled": round(ours["ms"] / compiled["ms"], 3),
                    "memory_ratio": round(ours["peak_mib"] / plain["peak_mib"], 3),
                }
            )
    return table


def show(table: list[dict[str, Any]]) -> None:
    for row in table:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoupled layers and networks against plain ones on a GPU.")
    parser.add_argument("record", nargs="?", type=Path, help="where to write the numbers, as JSON")
    parser.add_argument("--only", choices=["op", "train"], help="one of the two tables")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device")
    torch.backends.cudnn.benchmark = True
    record: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "hyperball": hb.__version__,
        "replays": REPLAYS,
    }
    for kind, rows in (("op", op_rows), ("train", train_rows)):
        if given.only in (None, kind):
            record[kind] = rows()
            show(record[kind])
    if given.record is not None:
        given.record.parent.mkdir(parents=True, exist_ok=True)
        given.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
