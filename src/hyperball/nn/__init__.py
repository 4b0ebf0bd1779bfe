"""Modules: parameters and one call."""

from hyperball.nn.decoupled import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledConvTranspose1d,
    DecoupledConvTranspose2d,
    DecoupledConvTranspose3d,
    DecoupledLinear,
    NormalizedLinear,
)

__all__ = [
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledConvTranspose1d",
    "DecoupledConvTranspose2d",
    "DecoupledConvTranspose3d",
    "DecoupledLinear",
    "NormalizedLinear",
]
