"""Whole networks by name, plain and decoupled, and the steps that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball import models
from hyperball.attacks import Robustness, evaluate_robustness
from hyperball.bench.case import DTYPES, Setting
from hyperball.bench.timing import Step

EPSILON = 8 / 255
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tanh + cosine": {"magnitude": "tanh", "angular": "cosine"},
    "linear + square_cosine": {"magnitude": "linear", "angular": "square_cosine"},
}
SIZES = {"cnn9": 32, "cnn9_adv": 32, "resnet32": 32, "resnet18": 224}
PGD = "pgd(steps=20)"


def network(name: str, setting: Setting, **options: Any) -> nn.Module:
    """A model of `hyperball.models` with ten classes, channels last."""
    torch.manual_seed(0)
    model = models.create(name, num_classes=10, **options)
    return model.to(setting.device).to(memory_format=torch.channels_last)


def images(batch: int, size: int, setting: Setting, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(setting.device).manual_seed(seed)
    x = torch.rand(batch, 3, size, size, generator=generator, device=setting.device)
    labels = torch.randint(0, 10, (batch,), generator=generator, device=setting.device)
    return x.contiguous(memory_format=torch.channels_last), labels


def autocast(setting: Setting, dtype: str) -> Any:
    """Autocast for bf16 and fp16, without a cache of casts, which a CUDA graph could not keep."""
    half = dtype in ("bf16", "fp16")
    return torch.autocast(setting.device, DTYPES[dtype] if half else torch.bfloat16, half, cache_enabled=False)


def loss_of(model: nn.Module, x: Tensor, labels: Tensor, setting: Setting, dtype: str) -> Tensor:
    with autocast(setting, dtype):
        return F.cross_entropy(model(x).float(), labels)


def training_step(
    model: nn.Module, batch: int, size: int, setting: Setting, dtype: str, fgsm: bool = False, compiled: bool = False
) -> Step:
    """Cross entropy, backward and SGD with momentum; with `fgsm` on x + ε·sgn(∂loss/∂x) in the place of x."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    x, labels = images(batch, size, setting)
    called: Any = torch.compile(model, dynamic=False) if compiled else model

    def step() -> None:
        given = attacked(called, x, labels, setting, dtype) if fgsm else x
        optimizer.zero_grad(set_to_none=True)
        loss_of(called, given, labels, setting, dtype).backward()
        optimizer.step()

    return step


def attacked(model: nn.Module, x: Tensor, labels: Tensor, setting: Setting, dtype: str) -> Tensor:
    """x + ε·sgn(∂loss/∂x), within [0, 1]."""
    probe = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, probe, labels, setting, dtype), probe)
    return (x + EPSILON * gradient.sign()).clamp(0, 1)


def evaluation_step(model: Callable[..., Any], x: Tensor, setting: Setting, dtype: str) -> Step:
    def step() -> None:
        with torch.inference_mode(), autocast(setting, dtype):
            model(x)

    return step


@torch.no_grad()
def predicted(model: Callable[..., Tensor], x: Tensor, batch: int = 1000) -> Tensor:
    """The class that a model gives every image."""
    return torch.cat([model(part).argmax(1) for part in x.split(batch)])


def attack_step(model: nn.Module, count: int, size: int, setting: Setting) -> Callable[[], Robustness]:
    """PGD-20 on random images at 8/255; the labels are the model's own classes, so that every image is attacked."""
    x, _ = images(count, size, setting)
    model.requires_grad_(False)
    labels = predicted(model, x)
    return lambda: evaluate_robustness(model, x, labels, epsilon=EPSILON, attacks=PGD, checks=False)


def clean_step(model: nn.Module, count: int, size: int, setting: Setting) -> Step:
    """The model's classes of the same images."""
    x, _ = images(count, size, setting)
    return lambda: predicted(model, x)
