"""A decoupled convolution with the BatchNorm and the activation behind it: one call, on a GPU in BatchNorm's passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hyperball.functional.decoupled import Angular, Magnitude
from hyperball.kernels import decoupled as kernel
from hyperball.kernels import dispatch
from hyperball.kernels.dispatch import Choice
from hyperball.kernels.norms import norm
from hyperball.kernels.window import Window
from hyperball.nn.decoupled import DecoupledConv2d

ACTIVATIONS = ("relu", "prelu", None)
WithLengths = tuple[Tensor, Tensor]


def conv_norm_act(
    conv: Any, batch_norm: Any, activation: Any, input: Tensor | WithLengths,
    residual: Tensor | WithLengths | None = None, carry: bool = False,
) -> Any:  # fmt: skip
    """activation(batch_norm(conv(x)) + residual), fused where it can be; with `carry`, and its lengths.

    The modules are any: what cannot be fused runs one after the other. `activation` may be None. An input or residual
    may be a pair (activation, lengths of its channel vectors [batch, 1, height, width]), as `carry` returns one.
    """
    x, lengths = input if isinstance(input, tuple) else (input, None)
    if lengths is not None and lengths.shape != (x.shape[0], 1, *x.shape[2:]):
        raise ValueError(
            f"`input` must hold lengths of shape {(x.shape[0], 1, *x.shape[2:])} beside its activation, "
            f"got {tuple(lengths.shape)}"
        )
    added = residual[0] if isinstance(residual, tuple) else residual
    modules = (conv, batch_norm, activation)
    if x.device.type in dispatch.DEVICES and choice_of(modules, x, added).kernel == "triton":
        out = _fused(modules, x, lengths, added, carry)
        return out if carry else out[0]
    made = batch_norm(conv(x))
    made = made if added is None else made + added
    made = made if activation is None else activation(made)
    return (made, norm(made, (1,))) if carry else made


def choice_of(modules: tuple[Any, Any, Any], x: Tensor, residual: Tensor | None = None) -> Choice:
    """The kernel that runs convolution, BatchNorm and activation on such an input, and why."""
    against = objection(modules, x, residual)
    if against:
        return Choice("eager", against)
    conv = modules[0]
    return kernel.chosen(kernel.as_convolved(x), conv.weight, conv.operator, conv.groups)


def objection(modules: tuple[Any, Any, Any], x: Tensor, residual: Tensor | None) -> str:
    """What about the modules or the tensors asks for running the modules in turn, or nothing."""
    conv, batch_norm, activation = modules
    if type(conv) is not DecoupledConv2d or type(batch_norm) is not nn.BatchNorm2d:
        return "modules of other types"
    if activation is not None and type(activation) not in (nn.ReLU, nn.PReLU, nn.Identity):
        return f"the activation {type(activation).__name__}"
    hooked = [m for m in modules if m is not None and (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks)]
    dtype = kernel.as_convolved(x).dtype
    rules = [
        (bool(hooked), "a module inside has hooks"),
        (conv.bias is not None, "the convolution has a bias"),
        (x.dim() != 4, "an input without a batch"),
        (not conv._needs_norm, "a linear magnitude with cosine needs no patch norm"),
        (residual is not None and residual.dtype != dtype, "input and residual differ in dtype"),
        (residual is not None and x.dim() == 4 and residual.shape != shape_of(conv, x), "a residual to expand"),
    ]
    reasons = [reason for holds, reason in rules if holds]
    return reasons[0] if reasons else ""


def shape_of(conv: Any, x: Tensor) -> torch.Size:
    """The shape of the convolution's output."""
    return output_shape(*kernel.with_even_padding(*conv.padded(x)), conv.out_channels)


def output_shape(x: Tensor, window: Window, channels: int) -> torch.Size:
    """The shape of a convolution's output, for a window that pads the same before and after."""
    spatial = [
        (size + 2 * window.padding[d][0] - window.reach(d) - 1) // window.stride[d] + 1
        for d, size in enumerate(x.shape[2:])
    ]
    return torch.Size([x.shape[0], channels, *spatial])


def _fused(
    modules: tuple[Any, Any, Any], x: Tensor, lengths: Tensor | None, residual: Tensor | None, carry: bool
) -> tuple[Tensor, Tensor]:
    from hyperball.kernels.triton import layer

    conv, bn, activation = modules
    padded, window = kernel.with_even_padding(*conv.padded(kernel.as_convolved(x)))
    if padded is not x or conv.groups > 1:
        lengths = None
    batch = bn.training or bn.running_mean is None
    if batch and output_shape(padded, window, 1).numel() == 1:
        raise ValueError(f"`input` must give more than 1 value per channel in training, got {tuple(x.shape)}")
    name = {nn.ReLU: "relu", nn.PReLU: "prelu"}.get(type(activation), "none")
    after = layer.Block(
        bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.eps, bn.momentum, batch,
        bn.training and bn.track_running_stats and bn.running_mean is not None, name,
        activation.weight if name == "prelu" else None, residual, carry,
    )  # fmt: skip
    with kernel.full_precision(x):
        return layer.block(padded, lengths, conv.weight, window, conv.operator, after)


class DecoupledConvBNAct(nn.Sequential):
    """act(BatchNorm(decoupled convolution) + residual): DecoupledConv2d, BatchNorm2d and ReLU, PReLU or nothing.

    It is the nn.Sequential of the three, with the same state dict and the same numbers. On a GPU they run fused: the
    scale of the decoupled convolution rides on BatchNorm's passes. With `carry=True` the output is a pair, the
    activation and the lengths of its channel vectors [batch, 1, height, width]; a block that is given such a pair
    need not read its input for the patch norms. The gradient through those norms goes through the lengths, so
    the gradient of the pair's activation alone is a part of the whole.

    >>> import torch, hyperball as hb
    >>> first = hb.nn.DecoupledConvBNAct(3, 8, 3, padding=1, carry=True)
    >>> second = hb.nn.DecoupledConvBNAct(8, 8, 3, padding=1)
    >>> second(first(torch.randn(2, 3, 8, 8))).shape
    torch.Size([2, 8, 8, 8])
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, device: Any = None, dtype: Any = None, *, magnitude: Magnitude = "tanh",
        angular: Angular = "cosine", weighting: str = "none", eps: float = 1e-4, activation: str | None = "relu",
        norm_eps: float = 1e-5, momentum: float | None = 0.1, carry: bool = False,
    ) -> None:  # fmt: skip
        if activation not in ACTIVATIONS:
            raise ValueError(f"`activation` must be one of {ACTIVATIONS}, got {activation!r}")
        conv = DecoupledConv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, device=device, dtype=dtype,
            magnitude=magnitude, angular=angular, weighting=weighting, eps=eps,
        )  # fmt: skip
        batch_norm = nn.BatchNorm2d(out_channels, norm_eps, momentum, device=device, dtype=dtype)
        last: list[nn.Module] = [nn.ReLU()] if activation == "relu" else []
        if activation == "prelu":
            last = [nn.PReLU(out_channels, device=device, dtype=dtype)]
        super().__init__(conv, batch_norm, *last)
        self.carry = carry

    @classmethod
    def of(cls, conv: DecoupledConv2d, batch_norm: nn.BatchNorm2d, activation: nn.Module | None = None) -> Any:
        """The block of modules that exist: their parameters are shared, not copied."""
        if not isinstance(conv, DecoupledConv2d) or not isinstance(batch_norm, nn.BatchNorm2d):
            raise TypeError(
                "`conv` and `batch_norm` must be a DecoupledConv2d and a BatchNorm2d, "
                f"got {type(conv).__name__} and {type(batch_norm).__name__}"
            )
        if activation is not None and not isinstance(activation, (nn.ReLU, nn.PReLU)):
            raise TypeError(f"`activation` must be a ReLU, a PReLU or None, got {type(activation).__name__}")
        block = cls.__new__(cls)
        nn.Sequential.__init__(block, conv, batch_norm, *([] if activation is None else [activation]))
        block.carry = False
        return block

    @property
    def _parts(self) -> tuple[Any, Any, Any]:
        return self[0], self[1], self[2] if len(self) > 2 else None

    def forward(self, input: Tensor | WithLengths, residual: Tensor | WithLengths | None = None) -> Any:
        return conv_norm_act(*self._parts, input, residual, self.carry)

    def choice(self, x: Tensor, residual: Tensor | None = None) -> Choice:
        """The kernel that runs this block on such an input, and why."""
        return choice_of(self._parts, x, residual)

    def explained(self) -> str:
        """The kernel for an input on the device and in the dtype of the weight, and why."""
        conv: Any = self[0]
        choice = self.choice(conv.weight.detach())
        return f"{choice}: scale, BatchNorm and activation in one pass" if choice.kernel == "triton" else str(choice)
