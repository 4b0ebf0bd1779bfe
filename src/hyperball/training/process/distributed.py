"""Statistics over all processes, so that DDP computes what one process would: BatchNorm and relative radii."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperball.kernels.norms import mean_length
from hyperball.nn.batch_norm import RobustBatchNorm
from hyperball.nn.learned import LearnedValue


class AllSum(torch.autograd.Function):
    """Σ over processes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def all_sum(x: Tensor) -> Tensor:
    total: Tensor = AllSum.apply(x)
    return total


class SynchronizedBatchNorm(_BatchNorm):
    """BatchNorm with mean and variance over all processes; torch's own needs a GPU, this does not."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"`input` must have at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input if input.dtype == torch.float64 else input.float()
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        count = all_sum(x.new_full((1,), x.numel() / x.shape[1]))
        mean = all_sum(x.sum(dims)) / count
        centered = x - mean.view(shape)
        variance = all_sum(centered.square().sum(dims)) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        out = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class SynchronizedValue(LearnedValue):
    """A learned value whose relative radius is in units of the mean length over all processes."""

    objection = "a mean length over all processes"

    def _unit(self, norm: Tensor | None) -> Tensor:
        if not self.training or norm is None or not norm.numel():
            return super()._unit(norm)
        local = mean_length(norm, self.eps)
        total = all_sum(torch.stack([local * norm.numel(), local.new_tensor(norm.numel())]))
        unit = total[0] / total[1]
        self._track(unit.detach(), norm.numel())
        return unit


def synchronize(model: nn.Module, device: torch.device, on: bool = True) -> None:
    """Give a model's layers statistics over all processes, in place; parameters and their names are unchanged.

    With `on` false every process keeps to its own, robust batch norms too, which synchronize by themselves.
    """
    for module in model.modules():
        if isinstance(module, RobustBatchNorm):
            module.sync = on
    if not on:
        return
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # of what lies inside, in place
    for module in model.modules():
        if type(module) is LearnedValue and module.is_relative:
            module.__class__ = SynchronizedValue
        elif isinstance(module, RobustBatchNorm):
            module.synchronize()
        elif type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = SynchronizedBatchNorm
