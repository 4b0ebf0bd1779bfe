"""Stateless operations: arguments are checked, then a kernel is called."""

from hyperball.functional.decoupled import (
    decoupled_conv1d,
    decoupled_conv2d,
    decoupled_conv3d,
    decoupled_conv_transpose1d,
    decoupled_conv_transpose2d,
    decoupled_conv_transpose3d,
    decoupled_linear,
)

__all__ = [
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_conv_transpose1d",
    "decoupled_conv_transpose2d",
    "decoupled_conv_transpose3d",
    "decoupled_linear",
]
