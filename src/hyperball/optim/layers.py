"""The decoupled layers of a model, their filters, and the hooks that follow an optimizer over them."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hyperball.kernels.norms import norm
from hyperball.nn.decoupled import Decoupled, DecoupledConvTransposeNd


def decoupled_layers(model: nn.Module) -> dict[str, Decoupled]:
    """The decoupled layers of `model` by their paths; a bare layer goes by the name of its class."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Decoupled)}
    if not layers:
        raise ValueError(f"`model` must have a decoupled layer, got {type(model).__name__} without any")
    return {name or type(layer).__name__: layer for name, layer in layers.items()}


def unweighted_layers(model: nn.Module) -> dict[str, Decoupled]:
    """The decoupled layers whose output does not depend on the length of their filters (weighting "none")."""
    layers = decoupled_layers(model)
    unweighted = {name: layer for name, layer in layers.items() if layer.weighting == "none"}
    if not unweighted:
        raise ValueError(f'`model` must have a decoupled layer of weighting "none", got {listed(layers)}')
    for name, layer in unweighted.items():
        if not isinstance(layer.weight, nn.Parameter):
            raise ValueError(f"`model` must hold its weights as parameters, got a parametrized weight in {name}")
    return unweighted


def listed(layers: dict[str, Decoupled]) -> str:
    """Names and weightings, for messages."""
    return ", ".join(f"{name} (weighting {layer.weighting!r})" for name, layer in layers.items())


def by_filter(layer: Decoupled, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A view of a weight-shaped tensor, and those of its dimensions that run over one filter.

    A transposed convolution's [in, out/groups, *kernel] is seen as [groups, in/groups, out/groups, *kernel].
    """
    if isinstance(layer, DecoupledConvTransposeNd):
        view = tensor.unflatten(0, (layer.groups, -1))
        return view, (1, *range(3, view.dim()))
    return tensor, tuple(range(1, tensor.dim()))


def filter_norms(layer: Decoupled, tensor: Tensor) -> Tensor:
    """‖w‖ of every filter, shaped to broadcast against the view of `by_filter`."""
    return norm(*by_filter(layer, tensor))


def held(optimizer: Optimizer) -> set[int]:
    """The identities of the parameters that `optimizer` updates."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_held(layers: dict[str, Decoupled], optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if held(optimizer).isdisjoint(id(layer.weight) for layer in layers.values()):
        raise ValueError(f"`optimizer` must update a weight of these layers, got none: {', '.join(layers)}")


class Attachment:
    """The hooks of one `attach`; `remove()`, or leaving a `with` block, takes them off."""

    def __init__(self, *handles: RemovableHandle) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
