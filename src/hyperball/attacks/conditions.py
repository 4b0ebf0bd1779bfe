"""The conditions of an evaluation: what identifies it, where it ran and with what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperball.attacks.bench import Bench
from hyperball.attacks.journal import fingerprint, rounded
from hyperball.attacks.methods.auto import seeded
from hyperball.attacks.methods.task import Model

FORMAT = 1
PROBES, LOGITS = 4, 32  # of a model's answers, which tell it from one of the same weights
WITHIN, TF32_WITHIN = 1e-4, 5e-3  # of the largest: what two processes on one kind of device may differ by
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
        "answers": answers(bench, bench.model),
        "source_answers": None if bench.source is None else answers(bench, bench.source),
    }


@torch.no_grad()
def answers(bench: Bench, model: Model) -> dict[str, Any]:
    """Logits of the first images and their negatives: hooks, attributes and functions are in no state dict."""
    x = bench.task(torch.arange(min(PROBES, len(bench.labels)))).x
    with seeded(bench.seed, bench.device):
        logits: Tensor = model(torch.cat([x, 1 - x]))
    logits = logits if logits.is_floating_point() else logits.float()
    coarse = _place(bench.device)["tf32"]
    within = max(TF32_WITHIN if coarse else WITHIN, 4 * torch.finfo(logits.dtype).eps)
    return {"within": within, "logits": [rounded(row) for row in logits[:, :LOGITS].detach().float().cpu()]}


def _sha256(model: Any) -> str | None:
    """Of the weights and the architecture's text; a plain function has none."""
    return fingerprint(model, repr(model)) if isinstance(model, torch.nn.Module) else None


def _place(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "tf32": bool(cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)),
    }
