"""Decoupled convolution for inference: when Triton's kernels of frozen layers run on a GPU, and a lean path on a CPU.

On a CPU, with cosine, f = y·s(n) + b. Norms are roots of float32 squares where the largest of these shows that none
overflows and that what vanishes is small beside it; tanh's gain uses tanh(t) = 2·sigmoid(2t) − 1, which is several
times faster on a CPU and as exact beside the largest outputs (1e-6).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels import dispatch
from hyperball.kernels.decoupled.operation import Operator, autocasts, plain_convolution, with_even_padding
from hyperball.kernels.norms import patch_norm
from hyperball.kernels.projection.solver import can_look
from hyperball.kernels.window import Window, box_sum
from hyperball.radial_functions import off_zero
from hyperball.rows import AnyValue, map_scalars

SMALLEST, LARGEST = 1e-18, 1e30  # of the largest sum of squares over channels, for these to be float32
MODES: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
NEAR = 0.1  # of the largest radius; where no patch is longer, tanh is computed as such


def applies(x: Tensor, operator: Operator, groups: int) -> bool:
    """Whether this path may run: eager, float32 on a CPU, without gradients, cosine, one group."""
    recording = torch.is_grad_enabled() and x.requires_grad
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and not autocasts(x)
    fits = operator.needs_norm and groups == 1 and angular_table.is_cosine(operator.angular)
    return plain and fits and not recording and not torch.compiler.is_compiling() and x.numel() > 0 and can_look(x)


def on_gpu(x: Any) -> bool:
    """Whether Triton's kernels of frozen layers may run on x: eager code on a GPU, which nobody differentiates."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or x.device.type not in dispatch.DEVICES:
        return False
    if x.requires_grad and torch.is_grad_enabled():
        return False
    seen = MODES() or not (type(x) is Tensor or type(x) is torch.nn.Parameter)
    return not seen and x.numel() > 0 and not dispatch.objection(surroundings())


def surroundings() -> dispatch.Facts:
    """The facts that do not depend on tensors."""
    return dispatch.Facts(
        dispatch.DEVICES[0], torch.float32, torch.float32, dispatch.NARROWEST, exporting=dispatch.is_exporting(),
        transformed=dispatch.is_transformed(), forward_mode=dispatch.has_tangents(), triton=dispatch.HAS_TRITON,
        rocm=dispatch.HAS_ROCM,
    )  # fmt: skip


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, operator: Operator) -> Tensor:
    """f = y·s(n) + b for prepared filters."""
    x, window = with_even_padding(x, window)
    n, longest = norms(x, window)
    y = plain_convolution(x, weight, window)
    column = (-1, *(1,) * (y.dim() - 2))
    magnitude = map_scalars(operator.magnitude(None), lambda p: shaped(p, column))
    return finish(y, n, longest, magnitude, None if bias is None else bias.reshape(column))


def shaped(parameter: object, column: tuple[int, ...]) -> object:
    return parameter.reshape(column) if isinstance(parameter, Tensor) and parameter.dim() else parameter


def norms(x: Tensor, window: Window) -> tuple[Tensor, float]:
    """n = ‖patch‖ from float32 squares, or from float64 ones where the largest of them calls for it; and max n.

    Where every pixel is seen by some patch, the longest pixel, which is known already, stands for the longest patch.
    """
    squares = x.square().sum(1, keepdim=True)
    most = float(squares.amax())
    if not SMALLEST < most < LARGEST:
        n = patch_norm(x, window)
        return n, float(n.amax())
    n = box_sum(squares, window).sqrt_()
    return n, math.sqrt(most) if covers(window) else float(n.amax())


def covers(window: Window) -> bool:
    """Whether every pixel is in some patch, as without strides and holes."""
    return set(window.stride) | set(window.dilation) == {1} and not window.transposed


def finish(y: Tensor, n: Tensor, longest: float, magnitude: AnyValue, bias: Tensor | None) -> Tensor:
    """y·s(n) + b; y may be overwritten."""
    terms = magnitude.terms
    if len(terms) == 1 and terms[0].name == "tanh":
        rho, alpha = terms[0].parameters["rho"], terms[0].parameters["alpha"]
        if longest > NEAR * float(torch.as_tensor(rho).max()):
            return tanh(y, n, rho, alpha, bias)
    return with_bias(y.mul_(radial_table.gain(magnitude, n)), bias)


def tanh(y: Tensor, n: Tensor, rho: Any, alpha: Any, bias: Tensor | None) -> Tensor:
    """y·alpha·tanh(n/rho)/n + b = (2·alpha·y/n)·(sigmoid(2n/rho) − 1/2) + b."""
    n = off_zero(n)
    per_channel = isinstance(rho, Tensor) and rho.dim() > 0
    # In y's memory layout, which a product of [B, 1, H, W] and [C, 1, 1] would not have by itself.
    gate = torch.mul(n, 2.0 / rho, out=torch.empty_like(y)) if per_channel else n * (2.0 / rho)
    y, gate = y.mul_((2.0 * alpha) / n), gate.sigmoid_().sub_(0.5)
    return y.mul_(gate) if bias is None else torch.addcmul(bias, y, gate, out=y)


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)
