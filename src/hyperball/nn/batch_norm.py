"""RobustBatchNorm1d and RobustBatchNorm2d: nn.BatchNorm's arguments, and a penalty whose radius may be learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from hyperball.functional.batch_norm import check_eps, check_penalty, robust_batch_norm
from hyperball.kernels.batch_norm.operation import work_dtype
from hyperball.nn.tracing import as_one_call
from hyperball.rows import AnyValue, Row, Value, require_positive

RADII = ("log_c", "fixed_c")


class RobustBatchNorm(_NormBase):
    """y = (x - m)/sqrt(s² + eps)·weight + bias with a robust location m and scale s of each channel.

    Arguments are nn.BatchNorm's, and c -> inf is nn.BatchNorm. The penalty's c counts in units of s; with ``learn_c``
    its logarithm is a parameter, ``log_c``, one value per channel or, with ``per="layer"``, one. A plain batch norm's
    state dict loads; the radius then keeps its value. With `sync`, the samples are those of all processes of
    `process_group` wherever torch.distributed is initialized; ``synchronize()`` switches that on later.
    `robust_batch_norm` has the definition. `running_var` is s², which float32 holds up to s = 1e19.

    It is no subclass of nn.BatchNorm: what replaces those (`nn.SyncBatchNorm.convert_sync_batchnorm`, fusion into
    convolutions) leaves it alone.

    >>> import torch, hyperball as hb
    >>> layer = hb.nn.RobustBatchNorm2d(8, penalty="huber(c=2, learn_c=True)")
    >>> layer(torch.randn(4, 8, 5, 5)).shape, layer.radius.shape
    (torch.Size([4, 8, 5, 5]), torch.Size([8]))
    """

    dims: tuple[int, ...]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        penalty: str | AnyValue | Row = "huber",
        sync: bool = True,
        process_group: Any = None,
    ) -> None:
        check_eps(eps)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        value = check_penalty(penalty)
        _check_options(value)
        self.sync, self.process_group = sync, process_group
        self._text = str(value).replace("rho", "c")
        self._start: list[float] | float = 1.0
        self.value = self._store(value, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _store(self, value: Value, factory: dict[str, Any]) -> Value:
        """Make a parameter of a learned radius and a buffer of a fixed tensor; returns the value without tensors."""
        held = value.parameters["rho"]
        learned = bool(value.options.get("learn_rho", False))
        if not learned and not isinstance(held, Tensor):
            return value
        require_positive(value)
        exact: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
        start = held.detach().to(**exact) if isinstance(held, Tensor) else torch.tensor(held, **exact)
        if start.dim() > 1 or start.numel() not in (1, self.num_features):
            raise ValueError(f"`c` must be a number or {self.num_features} of them, got shape {tuple(start.shape)}")
        if learned and value.options.get("per", "channel") == "channel":
            start = start.expand(self.num_features)
        elif learned and start.numel() > 1:
            raise ValueError(f"`c` must be one number where it is learned per layer, got {start.numel()}")
        self._start = start.tolist()
        if learned:
            self.log_c = nn.Parameter(torch.empty(start.shape, **factory))
        else:
            self.register_buffer("fixed_c", torch.empty(start.shape, **factory))
        return value.with_parameters(rho=value.row.parameters["rho"])

    def reset_parameters(self) -> None:
        """Set everything, the radius too, to what the layer was made with."""
        super().reset_parameters()
        start = torch.tensor(getattr(self, "_start", 1.0), device="cpu", dtype=torch.float64)
        with torch.no_grad():
            if "log_c" in self._parameters:
                self.log_c.copy_(start.log())
            elif "fixed_c" in self._buffers:
                self._buffers["fixed_c"].copy_(start)  # type: ignore[union-attr]

    @property
    def radius(self) -> Tensor:
        """c, in units of s: one value, or one per channel."""
        if "log_c" in self._parameters:
            return (self.log_c.float() if self.log_c.element_size() < 4 else self.log_c).exp()
        if "fixed_c" in self._buffers:
            return self.get_buffer("fixed_c")
        return torch.tensor(self.value.parameters["rho"])

    @property
    def penalty(self) -> Value:
        """The penalty with its present radius."""
        if "log_c" in self._parameters or "fixed_c" in self._buffers:
            return self.value.with_parameters(rho=self.radius)
        return self.value

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input)
        if input.dim() not in self.dims:
            expected = " or ".join(f"{dim}D" for dim in self.dims)
            raise ValueError(f"expected {expected} input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"`input` must have {self.num_features} channels, got shape {tuple(input.shape)}")
        from_batch = self.training or self.running_mean is None
        tracking = not self.training or self.track_running_stats
        return robust_batch_norm(
            input,
            self.running_mean if tracking else None,
            self.running_var if tracking else None,
            self.weight,
            self.bias,
            from_batch,
            self._average_factor(),
            self.eps,
            penalty=self.penalty,
            sync=self.sync and self.training,
            process_group=self.process_group,
        )

    def synchronize(self, process_group: Any = None) -> None:
        """Take the samples of all processes of the group, by default of all there are, in training."""
        self.sync, self.process_group = True, process_group

    def _average_factor(self) -> float | Tensor:
        """The weight of this batch in the running statistics: momentum, or 1/batches where that is None."""
        if not (self.training and self.track_running_stats) or self.num_batches_tracked is None:
            return 0.0
        assert self.running_mean is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            return 1.0 / self.num_batches_tracked.to(work_dtype(self.running_mean))
        return self.momentum

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        """A plain batch norm's state has no radius: what is missing keeps its value."""
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *rest)
        missing_keys.extend(key for key in missing if key not in [prefix + name for name in RADII])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, penalty={self._text!r}"


class RobustBatchNorm1d(RobustBatchNorm):
    __doc__ = (RobustBatchNorm.__doc__ or "") + "\n    Input [N, C] or [N, C, L].\n    "
    dims = (2, 3)


class RobustBatchNorm2d(RobustBatchNorm):
    __doc__ = (RobustBatchNorm.__doc__ or "") + "\n    Input [N, C, H, W].\n    "
    dims = (4,)


def _check_options(value: Value) -> None:
    """Refuse what a text may say elsewhere but means nothing here."""
    if "relative" in value.options:
        raise ValueError("`relative` has no effect on a robust batch norm: its c is always in units of the scale")
    for option in value.options:
        if option.startswith("learn_") and option != "learn_rho":
            raise ValueError(f"`{option}` is not offered by a robust batch norm, which learns c only")
    if value.options.get("learn_rho") and value.name == "truncated_quadratic":
        raise ValueError("`learn_c` is not offered with truncated_quadratic, which moves in jumps when c does")
