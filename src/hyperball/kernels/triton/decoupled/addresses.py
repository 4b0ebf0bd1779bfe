"""The launches of a plan by addresses alone, for eager code on a GPU, where the host's time is what a call costs.

Once a plan has run, its kernels are compiled: then memory is taken in one piece forward and one backward, and kernels
are given addresses inside of it, without a tensor for each. It serves operators whose only parameter, if they have
one, is the ratio of a relative radius. Lengths of input rows lie where the output will: they are read before it is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.triton.decoupled.launch import output_strides

WIDE, ALIGNED = torch.float32, 128  # bytes
convolution_backward = torch.ops.aten.convolution_backward.default


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of so many bytes begin, and where the last one ends."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    return found, end


class Forward:
    """A plan's forward: one memory for m, p, (unit, lift), n, filters and, by an implicit GEMM, y: for the backward."""

    def __init__(self, plan: Any, launches: Sequence[Any], running: torch.dtype | None) -> None:
        self.plan, self.running, self.dtype, self.device = plan, running, plan.dtype, plan.device
        self.implicit = plan.implicit is not None
        self.inputs = 4 + len(plan.given)  # of the autograd function, without what it is not given
        self.lengths, self.box, self.prepare, self.epilogue = launches  # no box where it is part of what prepares
        g, c, self.each = plan.geometry, plan.channels, plan.dtype.itemsize
        passing = [4 * size for size in plan.passing]
        room = g.positions * c * self.each
        sizes = [4 * c, 20 * c, 8, 4 * plan.norms, c * plan.size * self.each, room if self.implicit else 0]
        self.shape = (g.images, c, *g.out[3 - len(plan.window[0]) :])
        self.strides = output_strides(self.shape)
        self.inside = offsets(passing)[1] <= room
        found, end = offsets(sizes if self.inside else [*sizes, *passing])
        self.at, self.response, self.count = tuple(found[1:5]), found[5], end // self.each
        self.parts, self.rows = offsets(passing)[0] if self.inside else found[6:]
        self.index = plan.device.index
        self.numbers = {"dtype": self.dtype, "device": self.device}
        stride, padding, dilation, groups = plan.window
        self.settings = (stride, padding, dilation, False, plan.zeros, groups)

    def __call__(
        self, x: Tensor, weight: Tensor, ratio: Tensor | None, running: Tensor | None, batches: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """f, y where it is not part of the memory that is kept, and that memory."""
        whole = torch.empty(self.count, **self.numbers)
        f = torch.empty_strided(self.shape, self.strides, **self.numbers)
        m, out, rows = whole.data_ptr(), f.data_ptr(), x.data_ptr()
        p, scalars, n, filters = self.at
        p, scalars, n, filters = m + p, m + scalars, m + n, m + filters
        start = out if self.inside else m
        parts, r = start + self.parts, start + self.rows
        stream = self.lengths.stream(self.index)
        self.lengths(stream, rows, r)
        rho = m if ratio is None else ratio.data_ptr()
        mean = m if running is None else running.data_ptr()
        if self.box is None:
            self.prepare(stream, weight.data_ptr(), filters, m, p, scalars, m, m, rho, m, m, mean, r, n)
        else:
            self.box(stream, r, n, parts)
            count = m if batches is None else batches.data_ptr()
            self.prepare(stream, weight.data_ptr(), filters, m, p, scalars, m, m, rho, m, m, parts, mean, count)
        if self.implicit:
            self.epilogue(stream, rows, filters, out, m + self.response, n, p, p, p, scalars, p, p)
            return f, None, whole
        y = torch.convolution(x, self.filters(whole), None, *self.settings)
        if y.stride() != self.strides:
            y = y.contiguous(memory_format=self.plan.format)
        self.epilogue(stream, y.data_ptr(), n, p, p, p, scalars, p, p, p, p, p, out, p)
        return f, y, whole

    def serves(self, running: Tensor | None) -> bool:
        """Whether the launches are for this running mean, and go to the current device."""
        if running is not None and (running.dtype != self.running or running.device != self.device):
            return False
        return self.device.type != "cuda" or self.index == torch.cuda.current_device()

    def filters(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.plan.weight_shape, self.plan.filters, self.at[3] // self.each)

    def pieces(self, y: Tensor | None, whole: Tensor) -> tuple[Tensor, ...]:
        """y, n, filters, m, p, and (unit, lift) as tensors."""
        if y is None:
            y = whole.as_strided(self.shape, self.strides, self.response // self.each)
        numbers, c = whole.view(WIDE), self.plan.channels
        m, p, scalars, n = [
            numbers.narrow(0, at // 4, size)
            for at, size in zip((0, *self.at), (c, 5 * c, 2, self.plan.norms), strict=False)
        ]
        return y, n, self.filters(whole), m, p, scalars


class Backward:
    """A plan's backward for all gradients, or all but that of x: one memory for dy, t, sums, pulls and T's parts."""

    def __init__(self, forward: Forward, gradients: Any, launches: Sequence[Any], sums: torch.dtype | None) -> None:
        plan = forward.plan
        self.forward, self.sums = forward, sums
        self.of_input, of_filters, _ = gradients.mask
        self.implicit = gradients.implicit is not None
        self.mask = (self.of_input and not self.implicit, of_filters, False)
        self.epilogue, self.finish, self.add = launches
        room = plan.norms // plan.groups * plan.channels * forward.each
        found, end = offsets([room, *[4 * size for size in gradients.with_along], 4 * plan.channels])
        self.at, self.count = tuple(found[1:]), end // forward.each

    def __call__(
        self, v: Tensor, x: Tensor, weight: Tensor, ratio: Tensor | None, y: Tensor | None, whole: Tensor
    ) -> tuple[Tensor | None, ...]:
        """dx, dw and the ratio's gradient, None where there is no ratio; y is part of `whole` where it is None."""
        forward = self.forward
        scratch = torch.empty(self.count, **forward.numbers)
        m, dy, into = whole.data_ptr(), scratch.data_ptr(), v.data_ptr()
        p, scalars, n, filters = forward.at
        p, scalars, n, filters = m + p, m + scalars, m + n, m + filters
        t, parts, pulls, along, level, summed = [dy + at for at in self.at]
        stream = self.epilogue.stream(forward.index)
        made = m + forward.response if y is None else y.data_ptr()
        self.epilogue(stream, into, into, into, into, into, p, p, made, n, p, p, p, scalars, p, p, dy, t, parts)
        dx, dfilters = self.plain(scratch, x, whole)
        dw, sums, rho = torch.empty_like(weight), None, m
        if ratio is not None:
            sums = torch.empty(forward.plan.channels, dtype=self.sums, device=forward.device)
            summed, rho = sums.data_ptr(), ratio.data_ptr()
        ended = (
            stream, weight.data_ptr(), dfilters.data_ptr(), m, scalars, dw.data_ptr(), parts, summed, rho, pulls
        )  # fmt: skip
        if not self.of_input:
            self.finish(*ended)
            return None, dw, sums
        self.finish(*ended, t, n, along, level)
        if dx is None:
            dx = torch.empty_like(x)
            self.add(stream, dy, filters, dx.data_ptr(), x.data_ptr(), along, level, pulls)
        else:
            self.add(stream, dx.data_ptr(), x.data_ptr(), along, level, pulls)
        return dx, dw, sums

    def plain(self, scratch: Tensor, x: Tensor, whole: Tensor) -> tuple[Tensor | None, Tensor]:
        """The gradients of torch's convolution, of dy, which `scratch` begins with; that of x where cuDNN forms it."""
        forward, plan = self.forward, self.forward.plan
        dy = scratch.as_strided(forward.shape, forward.strides)
        found = convolution_backward(dy, x, forward.filters(whole), None, *forward.settings, self.mask)
        dx, dfilters = found[0], found[1]
        if dfilters.stride() != plan.filters:
            dfilters = dfilters.contiguous(memory_format=plan.format)
        if dx is not None and dx.stride() != x.stride():
            dx = dx.contiguous(memory_format=plan.format)
        return dx, dfilters


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


def dtype_of(held: Tensor | None) -> torch.dtype:
    """The dtype of a pointer's numbers; where there is no tensor, it points to what is kept."""
    return WIDE if held is None else held.dtype


def forward_of(plan: Any, weight: Tensor, ratio: Tensor | None, running: Tensor | None, track: bool) -> Forward | None:
    """The forward of a plan by addresses, if all of its launches are ready."""
    if not plan.whole:
        return None
    x, w = plan.dtype, WIDE
    made = (weight.dtype, x, w, w, w, w, w, dtype_of(ratio), w, w)
    pairs: list[Any] = [(plan.lengths, (x, w))]
    if plan.begin is not None:
        pairs += [None, (plan.begin, (*made, dtype_of(running), w, w))]
    else:
        counted = torch.int64 if track else w
        pairs += [(plan.box, (w,) * 3), (plan.prepare[track], (*made, w, dtype_of(running), counted))]
    if plan.implicit is None:
        pairs += [(plan.epilogue, (x, *(w,) * 10, x, w))]
    else:
        pairs += [(plan.implicit, (*(x,) * 4, *(w,) * 7))]
    launches = prepared(pairs)
    return None if launches is None else Forward(plan, launches, None if running is None else running.dtype)


def backward_of(forward: Forward, gradients: Any, weight: Tensor, ratio: Tensor | None) -> Backward | None:
    """The backward of a plan by addresses, if all of its launches are ready."""
    x, w, (shape, sums) = forward.dtype, WIDE, gradients.sums
    if not gradients.mask[1] or shape[0] != 1:
        return None
    if ratio is not None and (sums != ratio.dtype or ratio.dim() != 1 or not gradients.needed[4]):
        return None
    ended = (weight.dtype, x, w, w, weight.dtype, w, sums, dtype_of(ratio), w)
    pairs: list[Any] = [(gradients.epilogue, (*(x,) * 5, w, w, x, *(w,) * 7, x, w, w))]
    if not gradients.mask[0]:
        pairs += [(gradients.finish, ended), None]
    elif gradients.implicit is None:
        pairs += [(gradients.finish_box, (*ended, w, w, w, w)), (gradients.add, (x, x, w, w, w))]
    else:
        pairs += [(gradients.finish_box, (*ended, w, w, w, w)), (gradients.implicit, (x, x, x, x, w, w, w))]
    launches = prepared(pairs)
    return None if launches is None else Backward(forward, gradients, launches, sums)
