"""The conditions of an evaluation: what identifies it, where it ran and with what."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from hyperball._version import __version__
from hyperball.attacks.bench import Bench
from hyperball.attacks.journal import fingerprint

FORMAT = 1
PACKAGES = ("torch", "numpy", "pyautoattack")


def identify(bench: Bench, model: Any, source: Any) -> dict[str, Any]:
    """What two evaluations must share to be parts of one."""
    return {
        "format": FORMAT,
        "epsilon": bench.epsilon,
        "norm": bench.norm.name,
        "images": len(bench.labels),
        "classes": bench.classes,
        "batch_size": bench.batch_size,
        "seed": bench.seed,
        "model_sha256": _sha256(model),
        "source_sha256": None if source is None else _sha256(source),
        "data_sha256": fingerprint(bench.inputs, bench.labels),
        **_place(bench.device),
    }


def _sha256(model: Any) -> str | None:
    """Of the weights and the architecture's text; a plain function has none."""
    return fingerprint(model, repr(model)) if isinstance(model, torch.nn.Module) else None


def _place(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "tf32": bool(cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)),
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that matter here."""
    found = {"python": platform.python_version(), "hyperball": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
