"""Projection heads: BatchNorm1d(affine=False), then a projection, before a linear classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball.nn.projection import Projection
from hyperball.rows import nearest, read_text

PROJECTIONS = {
    f"{name}_{surface}": (p, surface)
    for name, p in (("l1", 1.0), ("l2", 2.0), ("linf", math.inf))
    for surface in ("ball", "sphere")
}
ARGUMENTS = ("radius", "learn")


def parse_projection(text: str) -> tuple[str, dict[str, Any]]:
    """``"l2_ball(radius=15)"`` as the name of a projection and its arguments, checked."""
    if not isinstance(text, str):
        raise TypeError(f"`projection` must be a text such as 'l2_ball(radius=15)', got {text!r}")
    terms = read_text(text)
    if len(terms) != 1:
        raise ValueError(f"`projection` must be one of {', '.join(PROJECTIONS)}, with radius and learn, got {text!r}")
    name, given = terms[0]
    if name not in PROJECTIONS:
        raise ValueError(f"unknown projection {name!r}; {nearest(name, PROJECTIONS)}")
    for key, _ in given:
        if key not in ARGUMENTS:
            raise ValueError(f"`{name}` has no parameter {key!r}; {nearest(key, ARGUMENTS)}")
    return name, dict(given)


def make_projection(text: str, device: Any = None, dtype: Any = None) -> Projection:
    """The projection that a text names: l1, l2 or linf, ball or sphere, with `radius` and `learn`.

    >>> make_projection("l2_ball(radius=15)")
    Projection(p=2.0, surface='ball', radius=15, learn=True, dim=-1)
    """
    name, given = parse_projection(text)
    p, surface = PROJECTIONS[name]
    return Projection(p, surface, given.get("radius"), learn=given.get("learn", True), device=device, dtype=dtype)


class ProjectedLinear(nn.Linear):
    """y = W·project((x − μ)/sqrt(σ² + ε)) + b: a linear classifier whose features are whitened and projected first.

    It keeps nn.Linear's entries `weight` and `bias` in the state dict, so that those of a plain classifier load.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        projection: str = "l2_ball",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.norm = nn.BatchNorm1d(in_features, affine=False, device=device, dtype=dtype)
        self.projection = make_projection(projection, device, dtype)

    def features(self, input: Tensor) -> Tensor:
        """What the classifier sees: whitened, projected features of the shape of the input."""
        rows = input.reshape(-1, self.in_features)
        return self.projection(self.norm(rows)).reshape(input.shape)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.features(input), self.weight, self.bias)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        # A plain classifier's state has nothing for the head: what is missing keeps its initial value.
        for name, held in self.state_dict(keep_vars=True).items():
            if name.partition(".")[0] in ("norm", "projection") and not held.is_meta:
                state_dict.setdefault(prefix + name, held.detach())


def head_paths(model: nn.Module, last: str | None) -> list[str]:
    """The linear classifiers that timm's configuration names (a distilled model has two), or else `last`."""
    configuration = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    named = configuration.get("classifier") if isinstance(configuration, Mapping) else None
    paths = (named,) if isinstance(named, str) else tuple(named or ())
    modules = dict(model.named_modules())
    found = [str(path) for path in paths if isinstance(modules.get(path), nn.Linear)]
    return found or ([] if last is None else [last])


def is_plain_linear(module: Any) -> bool:
    """Whether it computes x·Wᵀ + b, with parameters of its own: nn.Linear, or a subclass that does so on a probe."""
    if not isinstance(module, nn.Linear) or type(module).__module__.startswith("hyperball."):
        return False
    held = module._parameters
    if "forward" in vars(module) or not isinstance(held.get("weight"), nn.Parameter) or "bias" not in held:
        return False
    if type(module).__call__ is not nn.Module.__call__:
        return False
    return type(module).forward is nn.Linear.forward or computes_linear_map(module)


def computes_linear_map(module: nn.Linear) -> bool:
    """Whether small, middling and large inputs all come out as x·Wᵀ + b, in training and in evaluation."""
    if module.weight.is_meta or module._forward_hooks or module._forward_pre_hooks:
        return False
    mode = module.training
    drawn = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0))
    x = (drawn * torch.tensor([[1e-3], [1.0], [100.0]])).to(module.weight.device, module.weight.dtype)
    try:
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
            expected = F.linear(x, module.weight, module.bias)
            return all(torch.allclose(module.train(flag).forward(x), expected) for flag in (False, True))
    except Exception:  # whatever a subclass's forward may raise
        return False
    finally:
        module.train(mode)


def projected_twin(classifier: Any, projection: str) -> ProjectedLinear:
    """A projected classifier with the very parameters of a plain one."""
    weight, features = classifier.weight, (classifier.in_features, classifier.out_features)
    made = ProjectedLinear(*features, bias=False, device="meta", projection=projection)
    made.register_parameter("weight", weight)
    made.register_parameter("bias", classifier.bias)
    made.norm = nn.BatchNorm1d(features[0], affine=False, device=weight.device, dtype=weight.dtype)
    made.projection = make_projection(projection, weight.device, weight.dtype)
    return made.train(classifier.training)
