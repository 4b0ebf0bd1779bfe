"""Modules: parameters and one call."""

from hyperball.nn.batch_norm import RobustBatchNorm1d, RobustBatchNorm2d
from hyperball.nn.declarative import Declarative
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
from hyperball.nn.fused import DecoupledConvBNAct
from hyperball.nn.pooling import RobustPool1d, RobustPool2d
from hyperball.nn.projection import Projection

__all__ = [
    "Declarative",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledConvBNAct",
    "DecoupledConvTranspose1d",
    "DecoupledConvTranspose2d",
    "DecoupledConvTranspose3d",
    "DecoupledLinear",
    "NormalizedLinear",
    "Projection",
    "RobustBatchNorm1d",
    "RobustBatchNorm2d",
    "RobustPool1d",
    "RobustPool2d",
]
