"""The device that cells and measurements run on."""

from __future__ import annotations

import torch

ON_GPUS_ALONE = ("fp16", "tf32")  # precisions that training refuses on a CPU


def device_of(accelerator: str) -> torch.device:
    """The device that "cpu", "cuda" or "auto" stands for; a GPU that is not there is refused."""
    has_gpu = torch.cuda.is_available()
    if accelerator == "cuda" and not has_gpu:
        raise ValueError('`accelerator` must be "cpu" or "auto" where torch finds no GPU, got "cuda"')
    return torch.device("cuda" if has_gpu and accelerator != "cpu" else "cpu")


def check_device(accelerator: str, precision: str) -> None:
    """Refuse a device that is not there, or on which networks cannot compute in a precision."""
    device = device_of(accelerator)
    if device.type == "cpu" and precision in ON_GPUS_ALONE:
        raise ValueError(
            f'`accelerator` must be a GPU for cells in {precision}, got "{accelerator}", which is a CPU here; the '
            "scale quick runs on one"
        )
