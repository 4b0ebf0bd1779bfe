"""Our loop against a plain eager PyTorch loop with a DataLoader, CNN-9, batch 128, images like CIFAR-10's.

    python benchmarks/training.py [record.json] [--data ROOT] [--seconds 8] [--variants]

Both train the same network in bfloat16 with Adam on randomly cropped and flipped images; images/s are those of whole
epochs without the first, and the time to the first step includes compilation. Without `--data` the images are random.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hyperball as hb
from hyperball import data
from hyperball.training import Recipe, Silent, TrainReport, train
from hyperball.training.network import build_network

BATCH = 128
PAD = 4
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tanh + cosine": {"model.magnitude": "tanh"},
    "linear + square cosine": {"model.magnitude": "linear", "model.angular": "square_cosine"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "compiled and captured": {"engine.compile": True},  # what the loop does with a plain network
    "captured": {"engine.compile": False},  # and with a decoupled one
    "compiled": {"engine.compile": True, "engine.capture": False},
    "eager": {"engine.compile": False, "engine.capture": False},
}


def images(root: str | None) -> data.Dataset:
    if root is not None:
        return data.load("cifar10", root)
    generator = torch.Generator().manual_seed(0)

    def samples(n: int) -> data.Samples:
        pixels = torch.randint(256, (n, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return data.Samples(pixels, torch.randint(10, (n,), generator=generator))

    return data.Dataset("random", "images", tuple("0123456789"), samples(50_000), samples(10_000))


def recipe_of(changes: dict[str, Any], **more: Any) -> Recipe:
    common = {
        "model.name": "cnn9", "data.crop": "mirror", "data.flip": True, "batch_size": BATCH,
        "precision": "bf16" if torch.cuda.is_available() else "fp32", "log.evaluate_every": 1000,
        "log.every": 1000,
    }  # fmt: skip
    return Recipe().override({**common, **changes, **more})


class Augmented(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A sample at a time: mirror padding, crop, flip, scaling, as DataLoader workers usually do it."""

    def __init__(self, samples: data.Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.samples.inputs[index].float() / 255
        image = F.pad(image[None], (PAD,) * 4, mode="reflect")[0]
        y, x, flip = torch.randint(2 * PAD + 1, (3,)).tolist()
        image = image[:, y : y + 32, x : x + 32]
        return (image.flip(2) if flip % 2 else image), int(self.samples.labels[index])


def reference(recipe: Recipe, dataset: data.Dataset, seconds: float, workers: int) -> dict[str, Any]:
    """A usual training loop: DataLoader, autocast, zero_grad, backward, step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    start = time.perf_counter()
    network: nn.Module = build_network(recipe, dataset)[0].to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.optimizer.lr)
    assert isinstance(dataset.train, data.Samples)
    loader = DataLoader(
        Augmented(dataset.train), BATCH, shuffle=True, drop_last=True, num_workers=workers,
        pin_memory=device.type == "cuda", persistent_workers=workers > 0,
    )  # fmt: skip
    first, began, done = 0.0, 0.0, 0
    while not done or time.perf_counter() - began < seconds:
        for inputs, labels in loader:
            inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                loss = F.cross_entropy(network(inputs), labels)
            loss.backward()
            optimizer.step()
            done += 1
            if not first or done == 30:  # the first steps choose algorithms and fill the workers' queues
                loss.item()
                first = first or time.perf_counter() - start
                began, counted = time.perf_counter(), done
            elif done % 10 == 0 and time.perf_counter() - began > seconds and done > 30:
                break
    loss.item()
    return {
        "images_per_second": round((done - counted) * BATCH / (time.perf_counter() - began)),
        "seconds_to_first_step": round(first, 2),
    }


class Times(Silent):
    """Keeps what the loop reports."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def trained(self, report: TrainReport) -> None:
        self.rates.append(report.images_per_second)


def ours(recipe: Recipe, dataset: data.Dataset) -> dict[str, Any]:
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        record = train(recipe, Path(folder) / "run", dataset=dataset, progress=times)
    rates = sorted(times.rates[1:])
    return {
        "images_per_second": round(rates[len(rates) // 2]),
        "seconds_to_first_step": record.timing["seconds_to_first_step"],
        "peak_memory_bytes": record.timing["peak_memory_bytes"],
        "engine": record.engine,
    }


def rows(dataset: data.Dataset, seconds: float, workers: int, variants: bool, epochs: int) -> list[dict[str, Any]]:
    table = []
    for name, changes in NETWORKS.items():
        plain_loop = reference(recipe_of(changes), dataset, seconds, workers)
        for variant in VARIANTS if variants else ["captured" if changes else "compiled and captured"]:
            engine = VARIANTS[variant]
            torch.compiler.reset()
            result = ours(recipe_of(changes, **engine, epochs=epochs), dataset)
            ratio = result["images_per_second"] / plain_loop["images_per_second"]
            table.append(
                {"network": name, "variant": variant, "ours": result, "reference": plain_loop, "ratio": round(ratio, 2)}
            )
            print(
                f"{name:<24} {variant:<22} {result['images_per_second']:>9,} images/s (DataLoader loop "
                f"{plain_loop['images_per_second']:,}: {ratio:.1f}x), first step after "
                f"{result['seconds_to_first_step']:.1f} s, compiled: {result['engine']['compiled_why']}, captured: "
                f"{result['engine']['captured_why']}",
                flush=True,
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", nargs="?", help="where to write the results as JSON")
    parser.add_argument("--data", help="folder that holds CIFAR-10; random images without it")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the reference runs")
    parser.add_argument("--epochs", type=int, default=4, help="how long ours runs")
    parser.add_argument("--workers", type=int, default=8, help="of the DataLoader")
    parser.add_argument(
        "--variants", action="store_true", help="not only as the loop chooses: with and without compilation and capture"
    )
    arguments = parser.parse_args()
    dataset = images(arguments.data)
    table = rows(dataset, arguments.seconds, arguments.workers, arguments.variants, arguments.epochs)
    if arguments.record:
        on_gpu = torch.cuda.is_available()
        record = {
            "what": (__doc__ or "").splitlines()[0],
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            "hyperball": hb.__version__,
            "set": dataset.name,
            "workers": arguments.workers,
            "statistic": "median over the epochs but the first",
            "rows": table,
        }
        Path(arguments.record).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
