"""torch.export and ONNX, with a batch dimension that stays open, and a check in onnxruntime."""

from __future__ import annotations

import importlib
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.convert.report import Difference
from hyperball.convert.running import difference, modes_kept, outputs

MOST_ON_CUDA = 65535  # images that cuDNN's BatchNorm takes: the choice is a guard of the exported program


def export_program(model: nn.Module, example: Tensor, *, dynamic_batch: bool = True) -> Any:
    """`torch.export.export` of the model in evaluation mode; with `dynamic_batch` the program takes any batch size.

    The example has a batch of at least two then, since torch takes sizes 0 and 1 for constants. On CUDA it takes up to
    65535 images.
    """
    check_example(model, example, dynamic_batch)
    shapes = ({0: batch_size(example)},) if dynamic_batch else None
    with modes_kept(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (example,), dynamic_shapes=shapes)


def batch_size(example: Tensor) -> Any:
    """The open dimension; up to MOST_ON_CUDA there, where torch's BatchNorm asks which kernel takes the batch."""
    if example.is_cuda and example.shape[0] <= MOST_ON_CUDA:
        return torch.export.Dim("batch", min=1, max=MOST_ON_CUDA)
    return torch.export.Dim("batch", min=1)


def export_onnx(
    model: nn.Module,
    example: Tensor,
    path: str | Path,
    *,
    dynamic_batch: bool = True,
    check: bool = True,
    tolerance: float = 1e-4,
) -> Difference | None:
    """Write the model as ONNX, and compare it with torch in onnxruntime on the example and on a batch of another size.

    A difference above `tolerance`, both absolute and relative to the largest output, or a NaN is an error, and no file
    is written. Freeze a model first (`hyperball.freeze`): filters are then constants and BatchNorm is folded.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"`path` must end in .onnx, got {path.name!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise ValueError(f"`tolerance` must be finite and >= 0, got {tolerance!r}")
    program = export_program(model, example, dynamic_batch=dynamic_batch)
    require("onnxscript")
    part = path.with_name(f".{path.name}.part")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
        made.save(str(part))
        gap = check_onnx(part, model, example, dynamic_batch) if check else None
        refuse_difference(gap, tolerance, path)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return gap


def refuse_difference(gap: Difference | None, tolerance: float, path: Path) -> None:
    """Raise where the difference is above the tolerance in both senses, or not a number."""
    if gap is not None and not (gap.absolute <= tolerance or gap.relative <= tolerance):
        raise ValueError(
            f"{path.name} was not written: onnxruntime and torch differ by {gap.absolute:.3g}, {gap.relative:.3g} "
            f"of the largest output, above the `tolerance` {tolerance:g}; is the model random in evaluation?"
        )


def check_onnx(path: str | Path, model: nn.Module, example: Tensor, dynamic_batch: bool = True) -> Difference:
    """The largest difference between onnxruntime and torch, on the example and, if it may vary, another batch size.

    It is NaN where an output is, and infinite where one is infinite on one side alone.
    """
    check_example(model, example, dynamic_batch)
    runtime = require("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    worst = torch.zeros(2, dtype=torch.double)
    for batch in [example, *([torch.cat([example, example])[1:]] if dynamic_batch else [])]:
        expected = outputs(model, batch, numbers=True)
        got = [torch.from_numpy(array) for array in session.run(None, {name: batch.detach().cpu().numpy()})]
        gap = difference(expected, got)
        worst = torch.maximum(worst, torch.tensor([gap.absolute, gap.relative], dtype=torch.double))  # a NaN stays
    return Difference(*worst.tolist())


def check_example(model: Any, example: Any, dynamic_batch: bool) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(example, Tensor):
        raise TypeError(f"`example` must be a tensor, got {type(example).__name__}")
    if dynamic_batch and (example.dim() == 0 or example.shape[0] < 2):
        raise ValueError(f"`example` must have a batch of at least 2 for dynamic_batch, got {tuple(example.shape)}")


def require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} is needed for ONNX: pip install 'hyperball[export]'") from error
