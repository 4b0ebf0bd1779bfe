"""Fused blocks in models of other libraries: known modules get a forward that runs them on a GPU.

Recognized are runs of convolution, BatchNorm and ReLU, PReLU or nothing in nn.Sequential (and in subclasses with its
forward), and, by their classes, the residual blocks and networks of torchvision's and timm's ResNets. A module keeps
its parameters, children and place and becomes an instance of a subclass of its class.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from hyperball.nn import fused
from hyperball.nn.fused_chain import Chained, Residual, candidate_at, candidates, opened
from hyperball.nn.fused_classes import NETWORKS, PATTERNS, STAGES, fused_class, key_of


def recognized(model: nn.Module) -> list[nn.Module]:
    """The modules that would run fused blocks if their class were swapped."""
    return [module for module in model.modules() if not isinstance(module, Chained | Residual) and is_known(module)]


def is_known(module: nn.Module) -> bool:
    key = key_of(type(module))
    if key in PATTERNS:
        return PATTERNS[key].fits(module)
    if key in NETWORKS:
        return has_blocks([getattr(module, name, None) for name in ("conv1", "bn1")]) or any(
            is_known(part) for name in STAGES for part in module.get_submodule(name).modules()
        )
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and has_blocks(opened(module))  # type: ignore[arg-type]


def has_blocks(flat: list[Any]) -> bool:
    """Whether a block, or a residual unit that holds one, is among modules that are called in turn."""
    units = any(isinstance(part, Residual) or (key_of(type(part)) in PATTERNS and is_known(part)) for part in flat)
    return units or any(candidate_at(flat, place) is not None for place in range(len(flat)))


def swap_all(model: nn.Module) -> list[tuple[nn.Module, type]]:
    """Swap the classes of all recognized modules; the modules with the classes that they had."""
    found = [(module, type(module)) for module in recognized(model)]
    for module, kind in found:
        swapped: Any = kind
        module.__class__ = fused_class(swapped)
    return found


def fuse_blocks(model: nn.Module) -> tuple[str, ...]:
    """Let decoupled convolutions run with the BatchNorm and the activation behind them on a GPU, in place.

    Returns the paths of the convolutions that do. State dicts, parameters and, on the CPU, every number stay the same.
    Recognized are nn.Sequential and the ResNets of torchvision and timm; all else runs as it did.

    >>> import torch, hyperball as hb
    >>> conv = hb.nn.DecoupledConv2d(3, 8, 3)
    >>> hb.convert.fuse_blocks(torch.nn.Sequential(conv, torch.nn.BatchNorm2d(8), torch.nn.ReLU()))
    ('0',)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    swapped = swap_all(model)
    inside, reasons = fused_paths(model)
    if not inside:
        for module, kind in swapped:
            module.__class__ = kind
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
        raise ValueError(f"no block to fuse in {type(model).__name__}: {why or 'none is recognized'}")
    return inside


def fused_paths(model: nn.Module) -> tuple[tuple[str, ...], Counter[str]]:
    """The paths of the convolutions in fused blocks, and how often which reason speaks against one."""
    names = {module: name for name, module in model.named_modules()}
    held = {parts[0]: fused.unfit_for_gpu(parts) for parts in candidates(model)}
    inside = tuple(name for conv, name in names.items() if held.get(conv) == "")
    return inside, Counter(reason for reason in held.values() if reason)
