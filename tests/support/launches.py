"""Counts operations that would launch a kernel on a GPU: all that are dispatched but views and memory."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FREE = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand", "lift_fresh",
    "new_empty", "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """The names of what was dispatched in a block, with how often."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.split("::")[-1]
        if name not in FREE:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def launches(work: Callable[[], Any]) -> int:
    """How many there are in some work."""
    with Launches() as counted:
        work()
    return counted.found.total()
