"""A decoupled convolution with the BatchNorm and the activation behind it: one call, on a GPU in BatchNorm's passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hyperball.functional.decoupled import Angular, Magnitude
from hyperball.kernels import dispatch
from hyperball.kernels.decoupled import operation as kernel
from hyperball.kernels.dispatch import Choice
from hyperball.kernels.norms import norm
from hyperball.kernels.window import Window
from hyperball.nn.decoupled import DecoupledConv2d, is_altered
from hyperball.nn.learned import LearnedValue

ACTIVATIONS = ("relu", "prelu", None)
FUSED_ACTIVATIONS: tuple[Any, ...] = (type(None), nn.ReLU, nn.PReLU, nn.Identity)
WithLengths = tuple[Tensor, Tensor]
Parts = tuple[Any, Any, Any]  # convolution, BatchNorm, and activation or None


def conv_norm_act(
    conv: Any, batch_norm: Any, activation: Any, input: Tensor | WithLengths,
    residual: Tensor | WithLengths | None = None, carry: bool = False,
) -> Any:  # fmt: skip
    """activation(batch_norm(conv(x)) + residual), fused where it can be; with `carry`, and its lengths.

    The modules are any: what cannot be fused runs one after the other. `activation` may be None. An input or residual
    may be a pair (activation, lengths of its channel vectors [batch, 1, height, width]), as `carry` returns one.
    """
    made = run_block((conv, batch_norm, activation), input, residual, carry)
    return (made, norm(made, (1,))) if carry and not isinstance(made, tuple) else made


def run_block(
    parts: Parts, input: Tensor | WithLengths, residual: Tensor | WithLengths | None = None, carry: bool = False
) -> Tensor | WithLengths:
    """`conv_norm_act`, whose lengths come with `carry` only where they cost nothing: where the block runs fused."""
    x, lengths = input if isinstance(input, tuple) else (input, None)
    if lengths is not None and lengths.shape != (x.shape[0], 1, *x.shape[2:]):
        raise ValueError(
            f"`input` must hold lengths of shape {(x.shape[0], 1, *x.shape[2:])} beside its activation, "
            f"got {tuple(lengths.shape)}"
        )
    added = None if residual is None else activation_of(residual)
    if may_fuse(x) and choice_of(parts, x, added).kernel == "triton":
        out, r = _fused(parts, x, lengths, added, carry)
        return (out, r) if carry else out
    conv, batch_norm, activation = parts
    made: Tensor = batch_norm(conv(x))
    made = made if added is None else made + added
    return made if activation is None else activation(made)


def activation_of(given: Tensor | WithLengths) -> Tensor:
    """The activation alone of what a block gave."""
    return given[0] if isinstance(given, tuple) else given


def may_fuse(x: Any) -> bool:
    """Whether blocks may run fused on x: a tensor on a GPU, no proxy, in no graph that is exported."""
    return isinstance(x, Tensor) and x.device.type in dispatch.DEVICES and not dispatch.is_exporting()


def choice_of(parts: Parts, x: Tensor, residual: Tensor | None = None) -> Choice:
    """The kernel that runs convolution, BatchNorm and activation on such an input, and why."""
    against = unfit(parts) or objection(parts, x, residual)
    if against:
        return Choice("eager", against)
    conv = parts[0]
    facts = dispatch.facts_of(x, conv.weight, conv.out_channels, conv.groups)
    return dispatch.choose_again(conv.magnitude.value, conv.angular.value, conv.weighting, facts)


def unfit(parts: Parts) -> str:
    """What about the modules asks for running them in turn, or nothing."""
    conv, batch_norm, activation = parts
    if type(conv) is not DecoupledConv2d or type(batch_norm) is not nn.BatchNorm2d:
        return "modules of other types"
    if type(activation) not in FUSED_ACTIVATIONS:
        return f"the activation {type(activation).__name__}"
    if any(is_altered(module) for module in (*parts, conv.magnitude, conv.angular) if module is not None):
        return "a module inside has hooks"
    if not conv._needs_norm:
        return "a linear magnitude with cosine needs no patch norm"
    if (batch_norm.weight is None) != (batch_norm.bias is None):
        return "a BatchNorm with one of weight and bias"
    if conv.bias is not None and batch_norm.bias is None:
        return "a bias before a BatchNorm that has none"
    if type(conv.magnitude) is not LearnedValue:
        return f"a magnitude of class {type(conv.magnitude).__name__}"
    return ""


def unfit_for_gpu(parts: Parts) -> str:
    """What about the modules asks for running them in turn on a GPU, whatever the input, or nothing."""
    against = unfit(parts)
    if against:
        return against
    conv: Any = parts[0]
    facts = dispatch.Facts(dispatch.DEVICES[0], torch.float32, torch.float32, conv.out_channels, conv.groups)
    choice = dispatch.choose(conv.magnitude.value, conv.angular.value, conv.weighting, facts)
    return "" if choice.kernel == "triton" else choice.reason


def objection(parts: Parts, x: Tensor, residual: Tensor | None) -> str:
    """What about the tensors asks for running the modules in turn, or nothing."""
    if x.dim() != 4:
        return "an input without a batch"
    if has_mixed_dtypes(parts, x):
        return "modules of different dtypes"
    if residual is None:
        return ""
    if residual.dtype != convolved_dtype(x):
        return "input and residual differ in dtype"
    return "" if residual.shape == shape_of(parts[0], x) else "a residual to expand"


def has_mixed_dtypes(parts: Parts, x: Tensor) -> bool:
    """Whether BatchNorm or PReLU has a dtype that it refuses to be given the convolution's output with.

    BatchNorm may have float32 beside any input, PReLU under autocast what autocast casts.
    """
    _, bn, activation = parts
    given = convolved_dtype(x)
    held = {t.dtype for t in (bn.weight, bn.bias, bn.running_mean, bn.running_var) if t is not None}
    if len(held) > 1 or not held <= {given, torch.float32}:
        return True
    leaks = {activation.weight.dtype} if type(activation) is nn.PReLU else set()
    return not leaks <= ({*dispatch.DTYPES} if kernel.autocasts(x) else {given})


def convolved_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast will convolve x."""
    casts = kernel.autocasts(x) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if casts else x.dtype


def shape_of(conv: Any, x: Tensor) -> torch.Size:
    """The shape of the convolution's output."""
    if conv.padding_mode == "zeros" and not isinstance(conv.padding, str):
        taps = zip(x.shape[2:], conv.kernel_size, conv.stride, conv.padding, conv.dilation, strict=True)
        return torch.Size(
            [x.shape[0], conv.out_channels, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in taps)]
        )
    return output_shape(*kernel.with_even_padding(*conv.padded(x)), conv.out_channels)


def output_shape(x: Tensor, window: Window, channels: int) -> torch.Size:
    """The shape of a convolution's output, for a window that pads the same before and after."""
    spatial = [
        (size + 2 * window.padding[d][0] - window.reach(d) - 1) // window.stride[d] + 1
        for d, size in enumerate(x.shape[2:])
    ]
    return torch.Size([x.shape[0], channels, *spatial])


def takes_lengths(parts: Parts) -> bool:
    """Whether a block reads the lengths that come with its input."""
    return not unfit(parts) and parts[0].groups == 1 and parts[0].padding_mode == "zeros"


def _fused(
    parts: Parts, x: Tensor, lengths: Tensor | None, residual: Tensor | None, carry: bool
) -> tuple[Tensor, Tensor]:
    from hyperball.kernels.triton.decoupled import layer

    conv, bn, activation = parts
    padded, window = kernel.with_even_padding(*conv.padded(kernel.as_convolved(x)))
    if padded is not x or conv.groups > 1:
        lengths = None
    batch = bn.training or bn.running_mean is None
    if batch and x.shape[0] == 1 and output_shape(padded, window, 1).numel() == 1:
        raise ValueError(f"`input` must give more than 1 value per channel in training, got {tuple(x.shape)}")
    name = {nn.ReLU: "relu", nn.PReLU: "prelu"}.get(type(activation), "none")
    with kernel.full_precision(x):
        after = layer.Block(
            bn.weight, shift_of(conv.bias, bn, batch), bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.eps,
            bn.momentum, batch, bn.training and bn.track_running_stats and bn.running_mean is not None, name,
            activation.weight if name == "prelu" else None, residual, carry,
        )  # fmt: skip
        made = layer.block(padded, lengths, conv.weight, window, conv.operator, after)
        if after.track and conv.bias is not None:
            follow_bias(conv.bias, bn)
    return made


def shift_of(bias: Tensor | None, bn: Any, batch: bool) -> Tensor | None:
    """β + γ·b/sqrt(σ² + ε), BatchNorm's shift with the convolution's bias b; the batch's own mean takes b away."""
    if bias is None:
        held: Tensor | None = bn.bias
        return held
    lift = 0.0 * bias if batch else bias * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
    shift: Tensor = bn.bias + lift
    return shift


@torch.no_grad()
def follow_bias(bias: Tensor, bn: Any) -> None:
    """running mean ← running mean + momentum·b: the mean of f + b, where that of f was tracked."""
    share = 1.0 / bn.num_batches_tracked if bn.momentum is None else bn.momentum
    bn.running_mean.add_((share * bias).to(bn.running_mean.dtype))


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

    def __getitem__(self, index: Any) -> Any:
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def append(self, module: nn.Module) -> Any:
        raise TypeError("a block has its two or three parts; put it and what follows into an nn.Sequential")

    def insert(self, index: int, module: nn.Module) -> Any:
        return self.append(module)

    def extend(self, sequential: Any) -> Any:
        return self.append(sequential)

    @property
    def _parts(self) -> tuple[Any, Any, Any]:
        conv, batch_norm, *activation = self._modules.values()
        return conv, batch_norm, activation[0] if activation else None

    def forward(self, input: Tensor | WithLengths, residual: Tensor | WithLengths | None = None) -> Any:
        return conv_norm_act(*self._parts, input, residual, self.carry)

    def choice(self, x: Tensor, residual: Tensor | None = None) -> Choice:
        """The kernel that runs this block on such an input, and why."""
        return choice_of(self._parts, x, residual)

    def explained(self) -> str:
        """The kernel for an input on the device and in the dtype of the weight, and why."""
        conv: Any = self[0]
        if conv.weight.device.type not in dispatch.DEVICES:
            return f"in turn: {unfit_for_gpu(self._parts) or 'fused on a GPU only'}"
        choice = self.choice(conv.weight.detach())
        if choice.kernel != "triton":
            return f"in turn: {choice.reason}"
        return f"fused block: {choice}: scale, BatchNorm and activation in one pass"
