"""A launch that is prepared once: a kernel, its grid and all of its arguments but the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import triton
from torch import Tensor


class Launch:
    """kernel[grid](*tensors, *rest), whose later calls are one C call each.

    Triton compiles a kernel anew for other dtypes and for addresses that are no multiples of 16: both are looked up
    here, and whatever is not known yet goes Triton's own way. A launch belongs to one device.
    """

    __slots__ = ("compiled", "grid", "index", "kernel", "rest", "warps")

    def __init__(self, kernel: Any, grid: Sequence[int], rest: Sequence[Any], warps: int, device: torch.device) -> None:
        first, second, third = (*grid, 1, 1)[:3]
        self.kernel, self.grid, self.rest = kernel, (first, second, third), tuple(rest)
        self.warps = warps
        self.index = device.index
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

    def __call__(self, *tensors: Tensor) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        kinds: tuple[Any, ...] = tuple([tensor.dtype for tensor in tensors])
        bits = 0
        for address in addresses:
            bits |= address
        if bits & 15:
            kinds += tuple([address & 15 == 0 for address in addresses])
        made = self.compiled.get(kinds)
        if made is None:
            self.first(kinds, tensors)
            return
        run, function, packed, stream, _ = made
        try:
            run(*self.grid, stream(self.index), function, packed, None, None, None, *addresses, *self.rest)
        except TypeError:  # a Triton whose launchers take other arguments: nothing was launched
            self.compiled[kinds] = None
            self.first(kinds, tensors)

    def first(self, kinds: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Launch as Triton does, and keep what the next launch of such tensors needs."""
        made = self.kernel[self.grid](*tensors, *self.rest, num_warps=self.warps)
        if kinds not in self.compiled:
            self.compiled[kinds] = handles(made, tensors, self.rest)

    def direct(self, kinds: tuple[torch.dtype, ...]) -> Direct | None:
        """The launch for addresses of such dtypes, all multiples of 16; None where it is not compiled."""
        made = self.compiled.get(kinds)
        return None if made is None else Direct(self, made)


class Direct:
    """A compiled launch, called with the stream and one address a pointer."""

    __slots__ = ("grid", "made", "middle", "rest", "run", "stream")

    def __init__(self, launch: Launch, made: tuple[Any, ...]) -> None:
        run, function, packed, self.stream, self.made = made
        self.grid, self.rest = launch.grid, launch.rest
        self.run, self.middle = below(run, function, packed)

    def __call__(self, stream: int, *addresses: int) -> None:
        self.run(*self.grid, stream, *self.middle, *addresses, *self.rest)


def below(run: Any, function: int, packed: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a launcher of Triton calls in C, and what that takes between the stream and the kernel's own arguments.

    It is asked of the launcher itself, by marks in place of arguments; where they do not come through as they were
    given, or the kernel needs memory of its own, it is the launcher.
    """
    above = (function, packed, None, None, None)
    sizes = [getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
    if any(sizes) or not callable(getattr(run, "launch", None)):
        return run, above
    seen: list[tuple[Any, ...]] = []
    grid, stream, marks = (1, 1, 1), object(), (object(), object())
    try:
        stand_in = copy(run)
        stand_in.launch = lambda *arguments: seen.append(arguments)
        stand_in(*grid, stream, *above, *marks)
    except Exception:  # whatever another Triton's launcher does with marks
        return run, above
    given = seen[0] if len(seen) == 1 else ()
    if given[:3] == grid and len(given) > 5 and given[3] is stream and given[-2:] == marks:
        return run.launch, given[4:-2]
    return run, above


def handles(made: Any, tensors: Sequence[Tensor], rest: Sequence[Any]) -> tuple[Any, ...] | None:
    """Launcher, function, metadata and stream of a compiled kernel; None where this Triton keeps them elsewhere.

    `made` comes along, since a kernel is unloaded with it.
    """
    try:
        stream = triton.runtime.driver.active.get_current_stream
        found = (made.run, made.function, made.packed_metadata, stream, made)
        known = len(made.src.fn.arg_names) == len(tensors) + len(rest)
    except (AttributeError, RuntimeError):
        return None
    return found if known and callable(made.run) and made.function else None


def ordered(kernel: Any, tensors: int, values: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments after so many tensors, in the kernel's own order."""
    return tuple([values[name] for name in kernel.arg_names[tensors:]])
