"""Self-checks: what a section times, in float32 on its device, against its definition in float64 on the CPU.

Each returns the greatest relative error of values and gradients, ‖found − truth‖ / ‖truth‖.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball.bench.case import Setting
from hyperball.bench.sections import inference, networks
from hyperball.bench.sections.pool import NORM_PENALTIES, naive_huber, ours, samples
from hyperball.bench.sections.projection import sorted_l1_ball
from hyperball.freeze import freeze
from hyperball.functional import project
from hyperball.nn import DecoupledConv2d, RobustBatchNorm2d

EPS = 1e-4
FLOOR = 1e-4
NAIVE_SHARE = 0.1  # ten steps of the naive iteration leave an error of their own
KINK_SHARE = 0.05  # one ReLU or maximum that rounding puts on the other side moves a network's gradients by 1e-3
POOLS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # phi'(z)/z and phi''(z)
    "huber": (lambda z: 1 / z.abs().clamp_min(1), lambda z: (z.abs() <= 1).to(z)),
    "pseudo_huber": (lambda z: (1 + z * z) ** -0.5, lambda z: (1 + z * z) ** -1.5),
    "welsch": (lambda z: (-z * z / 2).exp(), lambda z: (1 - z * z) * (-z * z / 2).exp()),
}
POOL_SHAPES = ((8, 16, 49), (2, 8, 2048))


def distance(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖ in float64."""
    exact = truth.detach().cpu().double()
    return float((found.detach().cpu().double() - exact).norm() / exact.norm())


def full_float32() -> AbstractContextManager[None]:
    """Without tf32 in cuDNN, whose default it is."""
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return flags


def twin(value: Tensor) -> Tensor:
    """A leaf with the same numbers in float64 on the CPU."""
    return value.detach().cpu().double().requires_grad_()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compared(found: Tensor, given: list[Tensor], truth: Tensor, leaves: list[Tensor]) -> float:
    """The greatest error of a value and of its gradients for one incoming gradient."""
    v = normal(*truth.shape, seed=1).double()
    gradients = torch.autograd.grad(found, given, v.to(found))
    exact = torch.autograd.grad(truth, leaves, v)
    return max(map(distance, (found, *gradients), (truth, *exact)))


def patches(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """n = √(‖patch‖² + eps) and ⟨patch, ŵ⟩."""
    n = (F.conv2d(x.square(), torch.ones_like(weight[:1]), padding=1) + EPS).sqrt()
    unit = weight / weight.flatten(1).norm(dim=1)[:, None, None, None]
    return n, F.conv2d(x, unit, padding=1)


def exact_tanh(x: Tensor, weight: Tensor, ratio: Tensor) -> Tensor:
    """f = tanh(n/rho)·⟨x, ŵ⟩/n, rho = (ratio² + floor)·mean(n)."""
    n, inner = patches(x, weight)
    rho = (ratio.view(-1, 1, 1).square() + FLOOR) * n.mean()
    return torch.tanh(n / rho) * inner / n


def exact_square(x: Tensor, weight: Tensor) -> Tensor:
    """f = ⟨x, ŵ⟩·|⟨x, ŵ⟩|/n."""
    n, inner = patches(x, weight)
    return inner * inner.abs() / n


def conv_error(setting: Setting) -> float:
    """tanh + cosine and linear + square_cosine, channels last; gradients of input, filters and radii."""
    torch.manual_seed(0)
    return max(
        layer_error({"magnitude": "tanh"}, exact_tanh, setting),
        layer_error({"magnitude": "linear", "angular": "square_cosine"}, exact_square, setting),
    )


def layer_error(options: dict[str, str], exact: Callable[..., Tensor], setting: Setting) -> float:
    layer = DecoupledConv2d(16, 64, 3, padding=1, bias=False, **options).to(setting.device)  # type: ignore[arg-type]
    layer = layer.to(memory_format=torch.channels_last)
    x = normal(4, 16, 12, 12, seed=0).to(setting.device).contiguous(memory_format=torch.channels_last)
    given = [x.requires_grad_(), *layer.parameters()]
    leaves = [twin(value) for value in given]
    with full_float32():
        return compared(layer(x), given, exact(*leaves), leaves)


def train_error(setting: Setting) -> float:
    """Outputs of a small decoupled network in training, and the gradients of its parameters all together.

    Of three batches the best gradients count: a wrong kernel is wrong in all, a kink is met in some.
    """
    model = networks.network("cnn9_adv", setting, magnitude="tanh").train()
    exact = copy.deepcopy(model).cpu().double()
    outputs, gradients = [], []
    for seed in range(3):
        x, labels = networks.images(4, 32, setting, seed)
        with full_float32():
            found = outcome(model, x, labels)
        truth = outcome(exact, x.cpu().double(), labels.cpu())
        outputs.append(distance(found[0], truth[0]))
        gradients.append(distance(found[1], truth[1]))
    return max(*outputs, KINK_SHARE * min(gradients))


def outcome(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradients of the loss with respect to all parameters as one vector."""
    found = model(x)
    gradients = torch.autograd.grad(F.cross_entropy(found, labels), list(model.parameters()))
    return found, torch.cat([gradient.flatten() for gradient in gradients])


def pool_error(setting: Setting) -> float:
    """Pooling of short and of long rows by each penalty that is timed, the naive peer, and batch normalization."""
    errors = [pooling_error(name, shape, setting) for name in POOLS for shape in POOL_SHAPES]
    return max(*errors, *(norm_error(name, setting) for name in NORM_PENALTIES))


def pooling_error(name: str, shape: tuple[int, ...], setting: Setting) -> float:
    """y = Σ w·x / Σ w with w = phi'(z)/z, z = y − x, iterated; ∂y/∂x = phi''(z) / Σ phi''(z)."""
    x = samples(shape, Setting("cpu"), "fp32").to(setting.device).requires_grad_()
    exact = x.detach().cpu().double()
    weight, curvature = POOLS[name]
    y = exact.median(-1, keepdim=True).values
    for _ in range(200):
        w = weight(y - exact)
        y = (w * exact).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)
    bent = curvature(y - exact)
    found = ours(name)(x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    error = max(distance(found, y.squeeze(-1)), distance(gradient, bent / bent.sum(-1, keepdim=True)))
    return max(error, NAIVE_SHARE * distance(naive_huber(x), y.squeeze(-1))) if name == "huber" else error


def norm_error(penalty: str, setting: Setting) -> float:
    """RobustBatchNorm2d against itself in float64; gradients of smooth penalties, for huber's jump at |z| = c."""
    layer = RobustBatchNorm2d(16, penalty=penalty).to(setting.device).train()
    exact = copy.deepcopy(layer).cpu().double()
    x = samples((8, 16, 8, 8), Setting("cpu"), "fp32").to(setting.device)
    given = [x.contiguous(memory_format=torch.channels_last).requires_grad_()]
    leaves = [twin(given[0])]
    if penalty == "huber":
        return distance(layer(*given), exact(*leaves))
    return compared(layer(*given), given, exact(*leaves), leaves)


def projection_error(setting: Setting) -> float:
    """The balls that are timed, the L1 ball by sorting; values and gradients."""
    exact: dict[float, tuple[float, Callable[[Tensor], Tensor]]] = {
        1: (10.0, lambda x: sorted_l1_ball(x, 10.0)),
        2: (12.0, lambda x: x * (12.0 / x.norm(dim=-1, keepdim=True)).clamp_max(1)),
        math.inf: (1.5, lambda x: x.clamp(-1.5, 1.5)),
    }
    errors = []
    for p, (radius, truth) in exact.items():
        x = normal(64, 256, seed=0).to(setting.device).requires_grad_()
        leaf = twin(x)
        errors.append(compared(project(x, radius, p=p), [x], truth(leaf), [leaf]))
    return max(errors)


def inference_error(setting: Setting) -> float:
    """A frozen ResNet-18 against the unfrozen one in float64; a frozen network is timed without gradients."""
    model = inference.settled(networks.NETWORKS["tanh + cosine"], setting)
    x, _ = networks.images(2, 64, setting, seed=1)
    with torch.no_grad(), full_float32():
        found = freeze(model)(x)
        return distance(found, model.cpu().double()(x.cpu().double()))


SELF_CHECKS: dict[str, Callable[[Setting], float]] = {
    "conv": conv_error,
    "train": train_error,
    "pool": pool_error,
    "projection": projection_error,
    "inference": inference_error,
    "scaling": conv_error,
}
