"""The compiled CPU path of decoupled layers: `decoupled.c`, lengths before the convolution and the epilogue after it.

It serves dense float32 tensors on the CPU in plain eager execution. Derivatives of derivatives, and whatever else
needs torch's own operators in the backward, are those of the eager twin, which is then run on the same inputs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels import dispatch, native
from hyperball.kernels.memory import dense, is_channels_last, is_dense, is_narrow, is_plain, restored
from hyperball.kernels.norms import inverse, patch_norm
from hyperball.kernels.replay import replayed
from hyperball.kernels.window import Window
from hyperball.rows import AnyValue, Value, flatten, rebuild

HEADERS = ("lanes.h", "decoupled_table.h", "decoupled_maps.h", "decoupled_filters.h")
SOURCE = native.source("decoupled.c", *HEADERS, functions=("lengths", "filters", "epilogue"))
MAGNITUDES = ("sphere", "ball", "tanh", "linear", "seg", "log", "mix", "barron")  # as numbered in C
ANGULARS = ("linear", "cosine", "sigmoid", "square_cosine", "power", "rectified_cosine")
ROWS = (
    {name: radial_table.TABLE.rows[name] for name in MAGNITUDES},
    {name: angular_table.TABLE.rows[name] for name in ANGULARS},
)
GIVEN = ("alpha", "beta", "rho", "shape", "angle", "factor", "stretch", "over")
SUMS = ("gain", "curvature", "bend", "extra", "one", "angle", "over")

INT64, INT32, FLOAT, POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Lengths(ctypes.Structure):
    """Mirrors `Lengths` in decoupled_maps.h."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "v", "n", "dx")),
        *((name, INT64) for name in ("batch", "groups", "channels")),
        *((name, INT64 * 3) for name in ("in_", "out", "kernel", "stride", "padding", "dilation")),
        *((name, INT32) for name in ("channels_last", "transposed", "threads")),
        ("parallel", POINTER),
    ]


class Measure(ctypes.Structure):
    """Mirrors `Filters` in decoupled_filters.h."""

    _fields_ = [
        *((name, POINTER) for name in ("w", "n", "m", "over")),
        *((name, INT64) for name in ("count", "size", "patches")),
        ("threads", INT32),
        ("parallel", POINTER),
    ]


class Job(ctypes.Structure):
    """Mirrors `Job` in decoupled.c."""

    _fields_ = [
        *((name, POINTER) for name in ("y", "n", "v", "f", "dy", "dn", "sums")),
        ("given", POINTER * len(GIVEN)),
        ("steps", INT64 * len(GIVEN)),
        *((name, FLOAT) for name in ("eps", "angular_eps")),
        *((name, INT64) for name in ("batch", "groups", "channels", "positions")),
        *((name, INT32) for name in ("channels_last", "magnitude", "angular", "has_factor", "has_stretch", "has_over")),
        *((name, INT32) for name in ("need", "threads")),
        ("parallel", POINTER),
    ]


class Library(NamedTuple):
    """The loaded functions, or None, and why."""

    lengths: Callable[..., int] | None
    epilogue: Callable[..., int] | None
    reason: str
    filters: Callable[..., int] | None = None


@functools.cache
def library() -> Library:
    """The compiled layer, built if it is not in the cache yet."""
    loaded, reason = native.load(SOURCE)
    if loaded is None:
        return Library(None, None, reason)
    for function, job in ((loaded.lengths, Lengths), (loaded.filters, Measure), (loaded.epilogue, Job)):
        function.argtypes, function.restype = [ctypes.POINTER(job)], ctypes.c_int
    return Library(loaded.lengths, loaded.epilogue, reason, loaded.filters)


def choose(magnitude: AnyValue, angular: Value, dtype: torch.dtype) -> dispatch.Choice:
    """ "native" or "eager" for an operator on dense tensors of the CPU, and why."""
    against = refusal(magnitude, angular)
    if not against and dtype != torch.float32:
        against = f"decoupled.c computes in float32, not {str(dtype).removeprefix('torch.')}"
    if against or library().epilogue is None:
        return dispatch.Choice("eager", against or library().reason)
    return dispatch.Choice("native", library().reason)


def refusal(magnitude: AnyValue, angular: Value) -> str:
    """What about the operator asks for the eager kernel, or nothing."""
    if len(magnitude.terms) > 1:
        return "a sum of magnitudes"
    if magnitude.name not in MAGNITUDES or angular.name not in ANGULARS:
        return f"decoupled.c has no row for {magnitude.name} and {angular.name}"
    known = ROWS[0][magnitude.name], ROWS[1][angular.name]
    return "" if known == (magnitude.terms[0].row, angular.row) else "a row that is not the table's"


def serves(x: Tensor) -> bool:
    """Whether the lengths of x may be measured in C."""
    return is_plain(x) and x.numel() > 0 and is_channels_last(x) is not None and library().lengths is not None


class PatchNorm(torch.autograd.Function):
    """(n, x): the lengths of the patches of x, and x itself for the convolution, whose gradient is then added to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        n = measured(x, window)
        ctx.window, ctx.shapes = window, (x.shape, n.shape)
        ctx.save_for_backward(x, n)
        ctx.set_materialize_grads(False)
        return n, x

    @staticmethod
    def backward(ctx: Any, grad_n: Tensor | None, grad_x: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_n is None:
            return grad_x, None
        x, n = restored(ctx.saved_tensors, ctx.shapes)
        if torch.is_grad_enabled() or not is_plain(x, n, grad_n, grad_x):
            (along,) = replayed(lambda t: patch_norm(t, ctx.window), [x], [True], grad_n)
            return along if grad_x is None else grad_x + along, None
        x, n = dense(x), n.contiguous()
        total = torch.zeros_like(x) if grad_x is None else grad_x
        if total.stride() != x.stride():
            total = torch.empty_like(x).copy_(total)
        _lengths(x, ctx.window, n=n, v=grad_n.contiguous(), dx=total)
        return total, None


def patch_norms(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """n, and x as the convolution shall see it, so that one pass adds both parts of the gradient of x."""
    if torch.is_grad_enabled() and x.requires_grad:
        n, seen = PatchNorm.apply(x, window)
        return n, seen
    return measured(x, window), x


def measured(x: Tensor, window: Window) -> Tensor:
    """n [batch, groups, *out]."""
    extra = window.output_padding or (0,) * window.dims
    sizes = [
        (size - 1) * stride + 1 + window.reach(d) - sum(window.padding[d]) + extra[d]
        if window.transposed
        else (size + sum(window.padding[d]) - window.reach(d) - 1) // stride + 1
        for d, (size, stride) in enumerate(zip(x.shape[2:], window.stride, strict=True))
    ]
    n = x.new_empty(x.shape[0], window.groups, *sizes)
    if n.numel():
        _lengths(x.contiguous() if is_narrow(x, window.groups) else x, window, n=n)
    return n


def _lengths(x: Tensor, window: Window, **tensors: Tensor) -> None:
    def three(values: Sequence[int], filler: int) -> Any:
        return (INT64 * 3)(*(filler,) * (3 - len(values)), *values)

    function = library().lengths
    assert function is not None
    job = Lengths(
        x=x.data_ptr(),
        batch=x.shape[0],
        groups=window.groups,
        channels=x.shape[1] // window.groups,
        in_=three(x.shape[2:], 1),
        out=three(tensors["n"].shape[2:], 1),
        kernel=three(window.kernel, 1),
        stride=three(window.stride, 1),
        padding=three([before for before, _ in window.padding], 0),
        dilation=three(window.dilation, 1),
        channels_last=bool(is_channels_last(x)),
        transposed=window.transposed,
        threads=torch.get_num_threads(),
        parallel=native.thread_pool(),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
    if function(ctypes.byref(job)):
        raise MemoryError("the lengths of patches ran out of memory")


class Call(NamedTuple):
    """An operator whose tensors are taken out: its rows, its numbers, the names of the tensors, and the eager twin."""

    magnitude: str
    angular: str
    groups: int
    numbers: dict[str, float]
    tensors: tuple[str, ...]
    eager: Callable[..., Tensor]


Twin = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, AnyValue, Value, int], Tensor]


def finish(
    y: Tensor, n: Tensor, factor: Tensor | None, stretch: Tensor | None, magnitude: AnyValue, angular: Value,
    groups: int, twin: Twin, over: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """f of an operator with one number a channel, or one, for each parameter; None where that is the twin's to do.

    `over` is 1/m where y is the convolution with filters that were not divided by their lengths m.
    """
    if refusal(magnitude, angular) or not is_plain(y, n) or library().epilogue is None or not n.is_contiguous():
        return None
    h, radial_tensors = flatten(magnitude)
    g, angular_tensors = flatten(angular)
    further = [(name, t) for name, t in (("factor", factor), ("stretch", stretch), ("over", over)) if t is not None]
    names = (*_names(magnitude), *("angle" for _ in angular_tensors), *(name for name, _ in further))
    tensors = [t.to(n.dtype) for t in (*radial_tensors, *angular_tensors, *(t for _, t in further))]
    fit = all(is_dense(t) and (t.numel() == 1 or tuple(t.shape) == (y.shape[1],)) for t in tensors)
    if not fit or is_channels_last(y) is None:
        return None
    split, end = len(radial_tensors), len(radial_tensors) + len(angular_tensors)

    def eager(y: Tensor, n: Tensor, *held: Tensor) -> Tensor:
        turned: Any = rebuild(g, held[split:end])
        extra = dict(zip(names[end:], held[end:], strict=True))
        radial = rebuild(h, held[:split])
        y = divided(y, extra.get("over"))
        return twin(y, n, extra.get("factor"), extra.get("stretch"), radial, turned, groups)

    call = Call(magnitude.name, angular.name, groups, _numbers(magnitude, angular), names, eager)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (y, n, *tensors)):
        return Epilogue.apply(call, y, n, *tensors)
    _epilogue(call, y, n, tensors, f=y)
    return y


def divided(y: Tensor, over: Tensor | None) -> Tensor:
    """y·over by channel: the convolution with filters that are divided by their lengths."""
    return y if over is None else y * over.reshape(-1, *(1,) * (y.dim() - 2))


def _names(value: AnyValue) -> tuple[str, ...]:
    return tuple(key for term in value.terms for key, held in term.parameters.items() if isinstance(held, Tensor))


def _numbers(magnitude: AnyValue, angular: Value) -> dict[str, float]:
    """What is a number, by the name that C has for it."""
    (term,) = magnitude.terms
    held = {
        **term.parameters,
        **{"angular_eps" if key == "eps" else "angle": v for key, v in angular.parameters.items()},
    }
    return {key: float(value) for key, value in held.items() if isinstance(value, float)}


class Epilogue(torch.autograd.Function):
    """f = factor·n·s(u)·g(y·over/n); keeps y, n and the parameters, as the eager twin does."""

    @staticmethod
    def forward(ctx: Any, call: Call, y: Tensor, n: Tensor, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.shapes = call, [t.shape for t in (y, n, *tensors)]
        ctx.save_for_backward(y, n, *tensors)
        f = torch.empty_like(y)
        _epilogue(call, y, n, tensors, f=f)
        return f

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        y, n, *tensors = restored(ctx.saved_tensors, ctx.shapes)
        if torch.is_grad_enabled() or not is_plain(grad, y, n, *tensors):
            return None, *replayed(call.eager, [y, n, *tensors], needed, grad)
        y, n = dense(y), n.contiguous()
        if grad.stride() != y.stride():
            grad = torch.empty_like(y).copy_(grad)
        needs = {name: need for name, need in zip(call.tensors, needed[2:], strict=True) if need}
        which = sorted({SUMS.index(s) for name in needs for s in parts(call, name)})
        sums = torch.zeros(len(SUMS), y.shape[1], dtype=torch.float64, device=y.device)
        dy, dn = torch.empty_like(y) if needed[0] else None, torch.empty_like(n) if needed[1] else None
        outputs = {name: t for name, t in (("dy", dy), ("dn", dn)) if t is not None}
        _epilogue(call, y, n, tensors, need=sum(1 << k for k in which), v=grad, sums=sums, **outputs)
        return None, dy, dn, *finished(call, sums, tensors, needed[2:])


def parts(call: Call, name: str) -> tuple[str, ...]:
    """Which sums over positions make the gradient of a parameter."""
    special = {("seg", "alpha"): ("extra",), ("seg", "beta"): ("one", "extra"), ("mix", "alpha"): ("one",)}
    general = {
        "alpha": "gain",
        "factor": "gain",
        "stretch": "bend",
        "angle": "angle",
        "beta": "extra",
        "shape": "extra",
        "over": "over",
    }
    radius = "bend" if call.magnitude in ("seg", "barron") else "curvature"
    return special.get((call.magnitude, name)) or (general.get(name, radius),)


def finished(call: Call, sums: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the parameters from the sums over positions, [SUMS, channels] in float64."""
    held = dict(zip(call.tensors, tensors, strict=True))
    grads: list[Tensor | None] = []
    for (name, parameter), need in zip(held.items(), needed, strict=True):
        if not need:
            grads.append(None)
            continue
        first, *more = (sums[SUMS.index(part)] for part in parts(call, name))
        total = first - more[0] if more else first
        if name != "factor" and "factor" in held:
            total = total * held["factor"]
        if name == "stretch":
            total = total * -inverse(parameter)
        elif name == "rho":
            total = total * ((1.0 if call.magnitude in ("seg", "barron") else -1.0) / parameter.double())
        elif name == "alpha" and call.magnitude not in ("seg", "mix"):
            total = total / parameter
        total = total if parameter.numel() > 1 or total.numel() == 1 else total.sum()
        grads.append(total.reshape(parameter.shape).to(parameter.dtype))
    return grads


def _epilogue(call: Call, y: Tensor, n: Tensor, tensors: Sequence[Tensor], need: int = 0, **outputs: Tensor) -> None:
    function = library().epilogue
    assert function is not None
    if y.numel() == 0:
        if "dn" in outputs:
            outputs["dn"].zero_()
        return
    if is_narrow(y, call.groups):
        return _positionwise(call, y, n, tensors, need, outputs)
    given = {name: t.detach().contiguous() for name, t in zip(call.tensors, tensors, strict=True)}
    given |= {
        name: torch.tensor(call.numbers[name], dtype=torch.float32, device="cpu")
        for name in GIVEN
        if name in call.numbers
    }
    job = Job(
        y=y.data_ptr(),
        n=n.data_ptr(),
        given=(POINTER * len(GIVEN))(*(given[name].data_ptr() if name in given else None for name in GIVEN)),
        steps=(INT64 * len(GIVEN))(*(int(name in given and given[name].numel() > 1) for name in GIVEN)),
        eps=math.sqrt(call.numbers.get("eps", 0.0)),
        angular_eps=call.numbers.get("angular_eps", 0.0),
        batch=y.shape[0],
        groups=call.groups,
        channels=y.shape[1] // call.groups,
        positions=y.shape[2:].numel(),
        channels_last=bool(is_channels_last(y)),
        magnitude=MAGNITUDES.index(call.magnitude),
        angular=ANGULARS.index(call.angular),
        has_factor="factor" in given,
        has_stretch="stretch" in given,
        has_over="over" in given,
        need=need,
        threads=torch.get_num_threads(),
        parallel=native.thread_pool(),
        **{name: tensor.data_ptr() for name, tensor in outputs.items()},
    )
    if function(ctypes.byref(job)):
        raise MemoryError("a decoupled layer ran out of memory")


def _positionwise(
    call: Call, y: Tensor, n: Tensor, tensors: Sequence[Tensor], need: int, outputs: dict[str, Tensor]
) -> None:
    """`_epilogue` with the positions of a channel beside each other, on copies."""
    held = {name: t.contiguous() if name == "v" else t for name, t in outputs.items()}
    written = {name: torch.empty_like(y, memory_format=torch.contiguous_format) for name in ("f", "dy") if name in held}
    _epilogue(call, y.contiguous(), n, tensors, need, **(held | written))
    for name, copy in written.items():
        outputs[name].copy_(copy)
