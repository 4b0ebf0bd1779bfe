"""Exporting from CUDA tensors that have no memory, so that no GPU is needed."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hyperball as hb
from hyperball.convert.export import MOST_ON_CUDA


@pytest.mark.parametrize("device, most", [("cuda", MOST_ON_CUDA), ("cpu", None)])
def test_an_open_batch_ends_where_torch_chooses_another_batch_norm(device, most):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model, x = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()).eval(), torch.empty(3, 4, 5, 5)
    (size,) = hb.convert.export_program(model, x).range_constraints.values()
    assert size.lower == 1
    assert (size.upper == most) if most else (size.upper > 2**31)
