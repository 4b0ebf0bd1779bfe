"""Lengths of a weighted operator's filters: one launch forward and one backward, where eager norms take some twenty."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperball.kernels.norms import filter_norms
from hyperball.kernels.replay import replayed
from hyperball.kernels.triton.call import Launch
from hyperball.kernels.triton.decoupled import launch
from hyperball.kernels.triton.decoupled.begin import filter_length
from hyperball.kernels.triton.decoupled.ops import filter_layout, on_its_device
from hyperball.kernels.triton.rows import inverse

LARGEST = 2048  # entries of a filter that a program holds at a time


@triton.jit
def length_kernel(weight: tl.tensor, m: tl.tensor, K: tl.constexpr, BK: tl.constexpr) -> None:
    """m = ‖w‖ of every filter."""
    o = tl.program_id(0)
    tl.store(m + o, filter_length(weight, o.to(tl.int64) * K, K, BK))


@triton.jit
def length_gradient_kernel(
    weight: tl.tensor, m: tl.tensor, dm: tl.tensor, dw: tl.tensor, K: tl.constexpr, BK: tl.constexpr
) -> None:
    """dw = ŵ·dm, which is 0 for a filter of length 0."""
    o = tl.program_id(0)
    start, over, pull = o.to(tl.int64) * K, inverse(tl.load(m + o)), tl.load(dm + o).to(tl.float32)
    for first in range(0, K, BK):
        at = first + tl.arange(0, BK)
        unit_filter = tl.load(weight + start + at, mask=at < K, other=0.0).to(tl.float32) * over
        tl.store(dw + start + at, (unit_filter * pull).to(dw.dtype.element_ty), mask=at < K)


@launch.kept
def launches(channels: int, size: int, device: torch.device) -> tuple[Launch, Launch]:
    """The launches of so many filters' lengths and of their gradient."""
    rest, grid = (size, min(launch.power(size), LARGEST)), (max(channels, 1),)
    return Launch(length_kernel, grid, rest, 4, device), Launch(length_gradient_kernel, grid, rest, 4, device)


@on_its_device
def lengths(weight: Tensor) -> Tensor:
    m = launch.floats(weight.device, weight.shape[0])
    if weight.numel():
        launches(weight.shape[0], weight[0].numel(), weight.device)[0](weight, m)
    else:
        m.zero_()
    return m


@on_its_device
def gradient(weight: Tensor, m: Tensor, dm: Tensor) -> Tensor:
    dw = torch.empty_like(weight)
    if weight.numel():
        launches(weight.shape[0], weight[0].numel(), weight.device)[1](weight, m, dm.contiguous(), dw)
    return dw


class FilterLengths(torch.autograd.Function):
    """m = ‖w‖ of every filter, for eager code; a second derivative is the eager twin's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        held = filter_layout(weight)
        m: Tensor = lengths(held)
        ctx.save_for_backward(weight, m)
        return m

    @staticmethod
    def backward(ctx: Any, dm: Tensor) -> Tensor | None:
        weight, m = ctx.saved_tensors
        if torch.is_grad_enabled():
            return replayed(filter_norms, (weight,), (True,), dm)[0]
        found: Tensor = gradient(filter_layout(weight), m, dm)
        return found
