"""The launches of a plan by addresses alone, for eager code on a GPU, where the host's time is what a call costs.

Once a plan has run, its kernels are compiled: then memory is taken in one piece forward and one backward, and kernels
are given addresses inside of it, without a tensor for each. It serves operators whose only parameter is the ratio of a
relative radius. Lengths of input rows lie where the output will: they are read before it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.triton.launch import output_strides

WIDE, ALIGNED = torch.float32, 128  # bytes


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of so many bytes begin, and where the last one ends."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    return found, end


class Forward:
    """A plan's forward: one memory for m, p, (unit, lift), n and the filters, which the backward keeps."""

    def __init__(self, plan: Any, launches: Sequence[Any], running: torch.dtype) -> None:
        self.plan, self.running, self.dtype, self.device = plan, running, plan.dtype, plan.device
        self.implicit = plan.implicit is not None
        self.lengths, self.box, self.prepare, self.epilogue = launches
        g, c, self.each = plan.geometry, plan.channels, plan.dtype.itemsize
        passing = [4 * size for size in plan.passing]
        sizes = [4 * c, 20 * c, 8, 4 * plan.norms, c * plan.size * self.each]
        self.shape = (g.images, c, *g.out[3 - len(plan.window[0]) :])
        self.strides = output_strides(self.shape)
        room = g.positions * c * self.each
        self.inside = offsets(passing)[1] <= room
        found, end = offsets(sizes if self.inside else [*sizes, *passing])
        self.at, self.count = found, end // self.each
        self.passing = offsets(passing)[0] if self.inside else found[5:]
        self.index = plan.device.index

    def __call__(self, x: Tensor, weight: Tensor, ratio: Tensor, running: Tensor, batches: Tensor | None) -> Any:
        """f, y and the memory that is kept."""
        plan = self.plan
        whole = torch.empty(self.count, dtype=self.dtype, device=self.device)
        f = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        m = whole.data_ptr()
        _, p, scalars, n, filters = [m + at for at in self.at[:5]]
        out = f.data_ptr()
        start = out if self.inside else m
        parts, r = [start + at for at in self.passing]
        stream = self.lengths.stream(self.index)
        self.lengths(stream, x.data_ptr(), r)
        self.box(stream, r, n, parts)
        self.prepare(
            stream, weight.data_ptr(), filters, m, p, scalars, m, m, ratio.data_ptr(), m, m, parts, running.data_ptr(),
            m if batches is None else batches.data_ptr(),
        )  # fmt: skip
        if self.implicit:
            y = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            self.epilogue(stream, x.data_ptr(), filters, out, y.data_ptr(), n, p, p, p, scalars, p, p)
            return f, y, whole
        stride, padding, dilation, groups = plan.window
        y = torch.convolution(x, self.filters(whole), None, stride, padding, dilation, False, plan.zeros, groups)
        if y.stride() != self.strides:
            y = y.contiguous(memory_format=plan.format)
        self.epilogue(stream, y.data_ptr(), n, p, p, p, scalars, p, p, p, p, p, out, p)
        return f, y, whole

    def serves(self, running: Tensor) -> bool:
        """Whether the launches are for this running mean, and go to the current device."""
        here = self.device.type != "cuda" or self.index == torch.cuda.current_device()
        return here and running.dtype == self.running

    def filters(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.plan.weight_shape, self.plan.filters, self.at[4] // self.each)

    def pieces(self, whole: Tensor) -> tuple[Tensor, ...]:
        """n, filters, m, p, and (unit, lift) as tensors."""
        numbers, c = whole.view(WIDE), self.plan.channels
        m, p, scalars, n = [
            numbers.narrow(0, at // 4, size) for at, size in zip(self.at, (c, 5 * c, 2, self.plan.norms), strict=False)
        ]
        return n, self.filters(whole), m, p, scalars


class Backward:
    """A plan's backward for all gradients, or all but that of x: one memory for dy, t, sums, pulls and T's parts."""

    def __init__(self, forward: Forward, gradients: Any, launches: Sequence[Any], dtype: torch.dtype) -> None:
        self.forward, self.mask, self.sums = forward, gradients.mask, dtype
        self.implicit = gradients.implicit is not None
        if self.implicit:
            self.mask = (False, *self.mask[1:])
        self.epilogue, self.finish, self.box, self.add = launches
        room = forward.plan.norms // forward.plan.groups * forward.plan.channels * forward.each
        found, end = offsets([room, *[4 * size for size in gradients.with_along]])
        self.at, self.count = found, end // forward.each

    def __call__(self, v: Tensor, x: Tensor, weight: Tensor, ratio: Tensor, y: Tensor, whole: Tensor) -> Any:
        """dx, dw and the ratio's gradient."""
        forward, plan = self.forward, self.forward.plan
        m = whole.data_ptr()
        _, p, scalars, n, filters = [m + at for at in forward.at[:5]]
        scratch = torch.empty(self.count, dtype=forward.dtype, device=forward.device)
        start = scratch.data_ptr()
        dy, t, parts, pulls, along, level = [start + at for at in self.at]
        stream, into = self.epilogue.stream(forward.index), v.data_ptr()
        self.epilogue(
            stream, into, into, into, into, into, p, p, y.data_ptr(), n, p, p, p, scalars, p, p, dy, t, parts
        )  # fmt: skip
        stride, padding, dilation, groups = plan.window
        dx, dfilters, _ = torch.ops.aten.convolution_backward.default(
            scratch.as_strided(forward.shape, forward.strides), x, forward.filters(whole), None, stride, padding,
            dilation, False, plan.zeros, groups, self.mask,
        )  # fmt: skip
        if dfilters.stride() != plan.filters:
            dfilters = dfilters.contiguous(memory_format=plan.format)
        dw = torch.empty_like(weight)
        sums = torch.empty(plan.channels, dtype=self.sums, device=forward.device)
        ended = (
            stream, weight.data_ptr(), dfilters.data_ptr(), m, scalars, dw.data_ptr(), parts, sums.data_ptr(),
            ratio.data_ptr(), pulls,
        )  # fmt: skip
        if self.implicit:
            dx = torch.empty_like(x)
            self.finish(*ended)
            self.box(stream, t, n, n, pulls, along)
            self.add(stream, dy, filters, dx.data_ptr(), x.data_ptr(), along)
        elif dx is None:
            self.finish(*ended)
        else:
            if dx.stride() != x.stride():
                dx = dx.contiguous(memory_format=plan.format)
            self.finish(*ended, t, n, along, level)
            self.add(stream, dx.data_ptr(), x.data_ptr(), along, level, pulls)
        return dx, dw, sums


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether all begin at multiples of 16 bytes, as the kernels were compiled for."""
    bits = 0
    for held in tensors:
        if held is not None:
            bits |= held.data_ptr()
    return not bits & 15


def prepared(pairs: Sequence[tuple[Any, Sequence[torch.dtype]] | None]) -> list[Any] | None:
    """The direct launches of these, for pointers to such dtypes; None where one is not compiled yet."""
    found = []
    for pair in pairs:
        ready = None if pair is None else pair[0].direct(tuple(pair[1]))
        if pair is not None and ready is None:
            return None
        found.append(ready)
    return found


def forward_of(plan: Any, weight: Tensor, ratio: Tensor, running: Tensor, track: bool) -> Forward | None:
    """The forward of a plan by addresses, if all of its launches are ready."""
    if not plan.whole:
        return None
    x, w = plan.dtype, WIDE
    counted = torch.int64 if track else w
    launches = prepared(
        (
            (plan.lengths, (x, w)),
            (plan.box, (w,) * 3),
            (plan.prepare[track], (weight.dtype, x, w, w, w, w, w, ratio.dtype, w, w, w, running.dtype, counted)),
            (plan.epilogue, (x, *(w,) * 10, x, w)) if plan.implicit is None else (plan.implicit, ((x,) * 4 + (w,) * 7)),
        )
    )
    return None if launches is None else Forward(plan, launches, running.dtype)


def backward_of(forward: Forward, gradients: Any, weight: Tensor, ratio: Tensor) -> Backward | None:
    """The backward of a plan by addresses, if all of its launches are ready."""
    x, w, (shape, sums) = forward.dtype, WIDE, gradients.sums
    if not gradients.mask[1] or shape[0] != 1 or sums != ratio.dtype or ratio.dim() != 1 or not gradients.needed[4]:
        return None
    ended = (weight.dtype, x, w, w, weight.dtype, w, sums, ratio.dtype, w)
    pairs: list[Any] = [(gradients.epilogue, (*(x,) * 5, w, w, x, *(w,) * 7, x, w, w))]
    if not gradients.mask[0]:
        pairs += [(gradients.finish, ended), None, None]
    elif gradients.implicit is None:
        pairs += [(gradients.finish_box, (*ended, w, w, w, w)), None, (gradients.add, (x, x, w, w, w))]
    else:
        pairs += [(gradients.finish, ended), (gradients.box[0], (w,) * 5), (gradients.implicit, (x, x, x, x, w))]
    launches = prepared(pairs)
    return None if launches is None else Backward(forward, gradients, launches, sums)
