"""`make bench`: ratios against references in the same run, one table a kind of layer.

python benchmarks/run.py [decoupled] [pooling] [projection] [inference]
"""

from __future__ import annotations

import argparse
import importlib
import platform
from typing import Any

import torch

SECTIONS = {
    "decoupled": "Decoupled 3×3 convolution, 32×64→64×32×32, channels_last, forward + backward; reference nn.Conv2d",
    "pooling": "Robust pooling forward; ratio: ours / x.mean(-1), then joint LBFGS / ours",
    "projection": "L1 projection forward; reference: sort and prefix sums; ratio reference / ours",
    "inference": "Converted and frozen ResNet-18 (tanh, cosine), evaluation; reference torchvision's",
}


def show(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["name"]) for row in rows)
    print(f"{'':<{width}}  {'ours ms':>9}  {'ref. ms':>9}  {'ratio':>7}  {'target':>8}  {'maps kept':>9}")
    for row in rows:
        target = row["target"] if isinstance(row["target"], str) else f">= {row['target']:g}"
        kept = f"{row['kept']:.2f}" if "kept" in row else ""
        print(
            f"{row['name']:<{width}}  {row['ours_ms']:9.2f}  {row['reference_ms']:9.2f}  {row['ratio']:7.2f}  "
            f"{target:>8}  {kept:>9}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios against references in the same run, on the CPU.")
    parser.add_argument("sections", nargs="*", help=f"which of {', '.join(SECTIONS)}; all by default")
    sections = parser.parse_args().sections
    for name in sections:
        if name not in SECTIONS:
            parser.error(f"unknown section {name!r}; known: {', '.join(SECTIONS)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    for name in sections or SECTIONS:
        print(f"\n{SECTIONS[name]}")
        show(importlib.import_module(name).rows())


if __name__ == "__main__":
    main()
