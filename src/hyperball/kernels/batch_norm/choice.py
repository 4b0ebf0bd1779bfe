"""Which kernel normalizes by a robust location and scale in training, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperball.kernels import dispatch
from hyperball.kernels.batch_norm.operation import Estimator

TRITON = ("quadratic", "huber", "pseudo_huber", "barron")  # those of triton/batch_norm_terms.py
EAGER = "torch's own operators and a hand-written implicit backward; it has no C path"
FUSED = "Newton steps on a sample, then over all samples; two passes backward; statistics are those of one process"


def choose(e: Estimator, device: torch.device, dtype: torch.dtype, empty: bool = False) -> dispatch.Choice:
    """The kernel for an estimator and a tensor of this device and dtype: Triton's where nothing speaks against it."""
    if device.type not in dispatch.DEVICES:
        return dispatch.Choice("eager", EAGER)
    rules = (
        (dispatch.HAS_ROCM, "ROCm"),
        (not dispatch.HAS_TRITON, "triton is not installed"),
        (dispatch.is_exporting(), "exported graphs hold torch's own operators"),
        (dispatch.is_transformed(), "inside torch.func transforms"),
        (not e.convex, f"{e.name} is not convex: huber's estimates come first, then local steps"),
        (e.name not in TRITON, f"no Triton row for {e.name}"),
        (e.group is not None, "statistics of several processes"),
        (dtype not in dispatch.DTYPES, str(dtype).removeprefix("torch.")),
        (empty, "an empty input"),
    )
    against = next((reason for holds, reason in rules if holds), "")
    return dispatch.Choice("eager", against) if against else dispatch.Choice("triton", FUSED)


def is_triton(e: Estimator, x: Tensor) -> bool:
    """Whether `choose` gives "triton" for x."""
    return choose(e, x.device, x.dtype, x.numel() == 0).kernel == "triton"
