"""Stateless operations: arguments are checked, then a kernel is called."""

from hyperball.functional.batch_norm import robust_batch_norm
from hyperball.functional.decoupled import (
    decoupled_conv1d,
    decoupled_conv2d,
    decoupled_conv3d,
    decoupled_conv_transpose1d,
    decoupled_conv_transpose2d,
    decoupled_conv_transpose3d,
    decoupled_linear,
)
from hyperball.functional.pooling import (
    robust_pool,
    robust_pool1d,
    robust_pool2d,
    robust_pool_vectors,
    segment_robust_pool,
)
from hyperball.functional.projection import project, project_box, project_simplex
from hyperball.functional.robust_loss import robust_loss

__all__ = [
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_conv_transpose1d",
    "decoupled_conv_transpose2d",
    "decoupled_conv_transpose3d",
    "decoupled_linear",
    "project",
    "project_box",
    "project_simplex",
    "robust_batch_norm",
    "robust_loss",
    "robust_pool",
    "robust_pool1d",
    "robust_pool2d",
    "robust_pool_vectors",
    "segment_robust_pool",
]
