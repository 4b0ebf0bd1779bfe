"""Robust pooling in place of a model's global average pooling: as a module, or by hooks where a function pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.convert.running import call, evaluating
from hyperball.nn.pooling import RobustPool1d, RobustPool2d

HOOK_NAME = "robust_pool"


class RobustGlobalPool(nn.Module):
    """Robust pooling over all positions of [B, C, H, W] or, with `channels_last`, of [B, H, W, C]."""

    def __init__(self, penalty: Any, flatten: bool = False, channels_last: bool = False) -> None:
        super().__init__()
        self.pool = RobustPool2d(penalty=penalty)
        self.flatten, self.channels_last = flatten, channels_last

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(x.movedim(-1, 1) if self.channels_last else x)
        if self.flatten:
            return pooled.flatten(1)
        return pooled.movedim(1, -1) if self.channels_last else pooled


def check_pool(penalty: Any) -> None:
    """Raise an error that names `pool` where a robust pooling does not take this penalty; None is no pooling."""
    try:
        if penalty is not None:
            RobustPool2d(penalty=penalty)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`pool` must be a penalty such as 'huber(c=1)', got {penalty!r}: {error}") from None


def is_robust(module: nn.Module) -> bool:
    return isinstance(module, RobustPool1d | RobustPool2d | RobustGlobalPool | PoolByHook)


def like(model: nn.Module, made: nn.Module) -> nn.Module:
    """A module on the device and in the dtype of the model's parameters."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return made.to(parameter.device, parameter.dtype)
    return made


def robust_twin(module: Any, penalty: Any) -> nn.Module:
    """The robust pooling that takes the place of an average pooling to one position."""
    if isinstance(module, nn.AdaptiveAvgPool1d):
        made: nn.Module = RobustPool1d(penalty=penalty)
    elif isinstance(module, nn.AdaptiveAvgPool2d):
        made = RobustPool2d(penalty=penalty)
    else:
        channels_last = tuple(getattr(module, "dim", (2, 3))) == (1, 2)
        made = RobustGlobalPool(penalty, bool(getattr(module, "flatten", False)), channels_last)
    return made.train(module.training)


class PoolByHook(nn.Module):
    """Pools in place of a function call: one hook keeps the features, another gives their pooling to what follows."""

    def __init__(self, penalty: Any, rectified: bool) -> None:
        super().__init__()
        self.pool = RobustPool2d(penalty=penalty)
        self.rectified = rectified
        self._features: Tensor | None = None

    def keep(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        """A forward hook of the module that gives the features."""
        self._features = output

    def replace(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A forward pre-hook of the module that is given the pooled features."""
        features, self._features = self._features, None
        if features is None:
            return None
        pooled = self.pool(features.relu() if self.rectified else features)
        return (pooled.reshape(arguments[0].shape), *arguments[1:])

    def install(self, model: nn.Module, source: str, target: str) -> Callable[[], None]:
        """Register the hooks; what this returns takes them off."""
        handles = [
            model.get_submodule(source).register_forward_hook(self.keep),
            model.get_submodule(target).register_forward_pre_hook(self.replace),
        ]
        model.add_module(HOOK_NAME, self)

        def remove() -> None:
            for handle in handles:
                handle.remove()
            del model._modules[HOOK_NAME]

        return remove

    def extra_repr(self) -> str:
        return f"rectified={self.rectified}"


class PoolSearch:
    """Finds, in one run, which module's 4-d output is averaged over its positions and given to which module."""

    def __init__(self) -> None:
        self.means: list[tuple[str, bool, Tensor]] = []
        self.found: tuple[str, str, bool] | None = None

    def look(self, model: nn.Module, batch: Any) -> tuple[str, str, bool] | None:
        """Source, target and whether a ReLU lies between; None where no function pools."""
        handles = []
        for name, part in model.named_modules():
            if name:
                handles.append(part.register_forward_pre_hook(self._compare(name)))
                handles.append(part.register_forward_hook(self._remember(name)))
        try:
            with evaluating(model):
                call(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        return self.found

    def _remember(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() == 4 and output.shape[2] * output.shape[3] > 1:
                self.found = None  # what was pooled before was a gate, not the whole
                self.means += [(name, False, output.mean((2, 3))), (name, True, output.relu().mean((2, 3)))]

        return hook

    def _compare(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            given = arguments[0] if arguments else None
            if not isinstance(given, Tensor) or given.dim() not in (2, 4) or given[0].numel() != given.shape[1]:
                return
            rows = given.flatten(1)
            for source, rectified, mean in reversed(self.means):
                if mean.shape == rows.shape and torch.allclose(mean, rows, rtol=1e-4, atol=1e-6):
                    if self.found is None or self.found[0] != source:
                        self.found = (source, name, rectified)
                    return

        return hook
