"""Decoupled layers in float64, in the forms the papers print: a truth that shares no code with the library.

Liu et al., *Decoupled Networks*, CVPR 2018: magnitudes (4)-(10), angular functions (11)-(14), weightings
(15)-(16); barron is the influence function of Barron, *A General and Adaptive Robust Loss Function*.
Angles are formed by acos and patches by explicit offsets. Every input is converted to float64.

Values hold everywhere, with cos = 0 for a zero patch or a zero filter. Gradients are autograd's and hold
where m > 0 and |cos| < 1, at patches with n > 0 or made of padding alone; at any other zero patch the input's
gradient is 0 here, which is not the derivative. The derivative of acos holds no epsilon near |cos| = 1.
"""

import math

import numpy as np
import torch
from torch import Tensor

Parameter = float | Tensor
Size = int | tuple[int, ...]
Index = list[int] | tuple[int, ...]

MAGNITUDES = ("sphere", "ball", "tanh", "linear", "seg", "log", "mix", "barron")
ANGULARS = ("linear", "cosine", "sigmoid", "square_cosine", "power", "rectified_cosine")
WEIGHTINGS = ("none", "linear", "joint", "split")
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def double(value: Parameter, device: torch.device | None = None) -> Tensor:
    """value as a float64 tensor, still attached to its graph."""
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def magnitude(
    name: str,
    n: Tensor,
    *,
    alpha: Parameter = 1.0,
    beta: Parameter | None = None,
    rho: Parameter = 1.0,
    shape: Parameter = 1.0,
    eps: float = 1e-4,
) -> Tensor:
    """h(n), equations (4)-(10), and barron (finite shape); beta is 0.5 for seg and 1 for mix by default."""
    n = double(n)
    alpha, rho, shape = (double(value, n.device) for value in (alpha, rho, shape))
    beta = double((0.5 if name == "seg" else 1.0) if beta is None else beta, n.device)
    if name == "sphere":
        return alpha * n / torch.sqrt(n**2 + eps)
    if name == "ball":
        return alpha * torch.minimum(n, rho) / rho
    if name == "tanh":
        return alpha * torch.tanh(n / rho)
    if name == "linear":
        return alpha * n
    if name == "seg":
        return torch.where(n <= rho, alpha * n, beta * n + alpha * rho - beta * rho)
    if name == "log":
        return alpha * torch.log(1 + n)
    if name == "mix":
        return alpha * n + beta * torch.log(1 + n)
    if name == "barron":
        b = torch.clamp((shape - 2).abs(), min=1e-6)
        return alpha * n * (1 + n**2 / (b * rho**2)) ** (shape / 2 - 1)
    raise ValueError(f"`name` must be one of {MAGNITUDES}, got {name!r}")


def angular(name: str, cos: Tensor, *, k: Parameter = 0.3, b: Parameter = 2.0) -> Tensor:
    """g(theta), equations (11)-(14), power and rectified cosine, with theta = acos(cos)."""
    theta = torch.acos(torch.clamp(double(cos), -1, 1))
    k, b = double(k, theta.device), double(b, theta.device)
    if name == "linear":
        return -(2 / math.pi) * theta + 1
    if name == "cosine":
        return torch.cos(theta)
    if name == "sigmoid":
        edge = torch.exp(-math.pi / (2 * k))
        inner = torch.exp(theta / k - math.pi / (2 * k))
        return (1 + edge) / (1 - edge) * (1 - inner) / (1 + inner)
    if name == "square_cosine":
        return torch.sign(torch.cos(theta)) * torch.cos(theta) ** 2
    if name == "power":
        return torch.sign(torch.cos(theta)) * torch.cos(theta).abs() ** b
    if name == "rectified_cosine":
        return torch.relu(torch.cos(theta))
    raise ValueError(f"`name` must be one of {ANGULARS}, got {name!r}")


_h, _g = magnitude, angular  # `response` takes arguments of the same names


def response(
    n: Tensor,
    m: Tensor,
    cos: Tensor,
    *,
    magnitude: str = "linear",
    angular: str = "cosine",
    weighting: str = "none",
    alpha: Parameter = 1.0,
    beta: Parameter | None = None,
    rho: Parameter = 1.0,
    shape: Parameter = 1.0,
    k: Parameter = 0.3,
    b: Parameter = 2.0,
    eps: float = 1e-4,
) -> Tensor:
    """f = h(n) g, m h(n) g, h(nm) g or h(m) h(n) g / alpha, for n, m, cos from `geometry`."""
    alpha, rho, shape, k, b = (_per_channel(value, cos) for value in (alpha, rho, shape, k, b))
    beta = None if beta is None else _per_channel(beta, cos)

    def h(length: Tensor) -> Tensor:
        return _h(magnitude, length, alpha=alpha, beta=beta, rho=rho, shape=shape, eps=eps)

    g = _g(angular, cos, k=k, b=b)
    if weighting == "none":
        return h(n) * g
    if weighting == "linear":
        return m * h(n) * g
    if weighting == "joint":
        return h(n * m) * g
    if weighting == "split" and magnitude not in ("seg", "mix"):
        return h(m) * h(n) / alpha * g
    raise ValueError(f"`weighting` must be one of {WEIGHTINGS}, split not for seg or mix, got {weighting!r}")


def decoupled_conv(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    **operator,
) -> Tensor:
    """f of every patch and filter, plus the bias; 1d, 2d or 3d by w, and `operator` as in `response`."""
    batched = x.ndim == w.ndim
    taken = patches(x if batched else x[None], tuple(w.shape[2:]), stride, padding, dilation, padding_mode)
    f = _add_bias(response(*geometry(taken, w, groups), **operator), bias)
    return f if batched else f[0]


def decoupled_conv_transpose(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    **operator,
) -> Tensor:
    """f of every output position, whose patch is the inputs that reach it, each at the tap that carries it.

    n^2 sums |x|^2 over those pairs and the group's input channels; m is the filter's norm over all its taps.
    """
    batched = x.ndim == w.ndim
    kernel = tuple(w.shape[2:])
    taken = transpose_patches(x if batched else x[None], kernel, stride, padding, output_padding, dilation)
    f = _add_bias(response(*geometry(taken, transpose_filters(w, groups), groups), **operator), bias)
    return f if batched else f[0]


def decoupled_linear(x: Tensor, w: Tensor, bias: Tensor | None = None, **operator) -> Tensor:
    """f of every row of x [..., I] and every row of w [O, I]: a single position with a single tap."""
    rows = double(x).reshape(-1, x.shape[-1], 1)  # [N, I, taps]
    f = _add_bias(response(*geometry(rows, w), **operator), bias)
    return f.reshape(*x.shape[:-1], w.shape[0])


def relative_radius(n: Tensor, r: Parameter, eps: float = 1e-4) -> Tensor:
    """rho_o = (r_o^2 + 1e-4) mean(sqrt(n^2 + eps)), the mean over every entry of n."""
    n = double(n)
    return (double(r, n.device) ** 2 + 1e-4) * torch.sqrt(n**2 + eps).mean()


def orthogonality(w: Tensor, groups: int = 1, kind: str = "orthonormal") -> Tensor:
    """Sum over groups of ||W W^T - I||_F^2, or of ||W W^T - diag(W W^T)||_F^2; the rows of W are filters."""
    total = double(w).new_zeros(())
    for block in double(w).flatten(1).chunk(groups):
        gram = block @ block.T
        kept = {"orthonormal": torch.ones(len(gram)).to(gram), "orthogonal": torch.diag(gram)}[kind]
        total = total + ((gram - torch.diag(kept)) ** 2).sum()
    return total


def patches(
    x: Tensor,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """The padded inputs [B, C, *space] under each tap of each window, [B, C, taps, *out]."""
    axes = range(x.ndim - 2)
    kernel, step, gap = (_tuple(size, len(axes)) for size in (kernel_size, stride, dilation))
    reach = [gap[i] * (kernel[i] - 1) for i in axes]
    if isinstance(padding, str):
        amounts = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
    else:
        amounts = [(p, p) for p in _tuple(padding, len(axes))]
    padded = pad(double(x), amounts, padding_mode)
    out = [(padded.shape[2 + i] - reach[i] - 1) // step[i] + 1 for i in axes]
    starts = [[tap[i] * gap[i] for i in axes] for tap in np.ndindex(*kernel)]
    return torch.stack([padded[_every(start, step, out)] for start in starts], dim=2)


def transpose_patches(
    x: Tensor,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    dilation: Size = 1,
) -> Tensor:
    """The input that each tap carries to each output position, 0 where there is none, [B, C, taps, *out]."""
    axes, space = range(x.ndim - 2), x.shape[2:]
    kernel, step, gap = (_tuple(size, len(axes)) for size in (kernel_size, stride, dilation))
    cut, extra = (_tuple(size, len(axes)) for size in (padding, output_padding))
    full = [(space[i] - 1) * step[i] + gap[i] * (kernel[i] - 1) + 1 + extra[i] for i in axes]
    out = [full[i] - 2 * cut[i] for i in axes]
    taps = []
    for tap in np.ndindex(*kernel):
        canvas = double(x).new_zeros(*x.shape[:2], *full)
        canvas[_every([tap[i] * gap[i] for i in axes], step, space)] = double(x)
        taps.append(canvas[_every(cut, _tuple(1, len(axes)), out)])
    return torch.stack(taps, dim=2)


def transpose_filters(w: Tensor, groups: int = 1) -> Tensor:
    """[I, O/groups, *kernel] of a transposed convolution as one filter a row, [O, I/groups, *kernel]."""
    return torch.cat([block.transpose(0, 1) for block in w.chunk(groups)])


def patch_norm(taken: Tensor, groups: int = 1) -> Tensor:
    """n = ||patch|| of each group, [B, groups, *out], of what `patches` or `transpose_patches` took."""
    batch, channels, taps, *out = taken.shape
    return norm(taken.reshape(batch, groups, channels // groups * taps, *out), 2)


def geometry(taken: Tensor, filters: Tensor, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """n [B, O, *out], m [O, *ones] and cos = <x, w/m> / n [B, O, *out] of every patch and filter."""
    batch, outputs, out = taken.shape[0], filters.shape[0], taken.shape[3:]
    rows = double(filters).reshape(outputs, -1)
    m = norm(rows, 1)
    unit = rows / torch.where(m > 0, m, 1)[:, None]
    columns = taken.reshape(batch, groups, rows.shape[1], -1)
    y = torch.einsum("bgdp,god->bgop", columns, unit.reshape(groups, -1, rows.shape[1]))
    n = patch_norm(taken, groups).repeat_interleave(outputs // groups, dim=1)
    cos = y.reshape(batch, outputs, *out) / torch.where(n > 0, n, 1)
    return n, m.reshape(-1, *[1] * len(out)), cos


def norm(x: Tensor, dim: int) -> Tensor:
    """sqrt(sum x^2) over dim, with gradient 0 at 0."""
    square = (x**2).sum(dim)
    return torch.where(square > 0, torch.sqrt(torch.where(square > 0, square, 1)), 0)


def pad(x: Tensor, amounts: list[tuple[int, int]], mode: str) -> Tensor:
    """x [B, C, *space] with (before, after) further entries along each axis of space."""
    for axis, (before, after) in enumerate(amounts, start=2):
        last = x.shape[axis] - 1
        position = torch.arange(-before, last + 1 + after, device=x.device)
        source = {
            "zeros": position.clamp(0, last),
            "replicate": position.clamp(0, last),
            "reflect": last - (last - position.abs()).abs(),
            "circular": position % (last + 1),
        }[mode]
        x = x.index_select(axis, source)
        if mode == "zeros":
            inside = (position >= 0) & (position <= last)
            x = torch.where(inside.reshape(-1, *[1] * (x.ndim - axis - 1)), x, 0)
    return x


def _per_channel(value: Parameter, like: Tensor) -> Tensor:
    """A parameter of shape (O,) laid along dimension 1 of like; any other shape as it is."""
    value = double(value, like.device)
    return value.reshape(-1, *[1] * (like.ndim - 2)) if value.ndim == 1 else value


def _add_bias(f: Tensor, bias: Tensor | None) -> Tensor:
    return f if bias is None else f + _per_channel(bias, f)


def _tuple(value: Size, length: int) -> tuple[int, ...]:
    return (value,) * length if isinstance(value, int) else tuple(value)


def _every(start: Index, step: Index, count: Index) -> tuple[slice, ...]:
    """The index of `count` entries from `start` on, `step` apart, along each axis of space."""
    spans = [slice(a, a + s * (c - 1) + 1, s) for a, s, c in zip(start, step, count, strict=True)]
    return (slice(None), slice(None), *spans)
