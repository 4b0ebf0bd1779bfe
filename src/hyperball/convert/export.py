"""torch.export and ONNX, with a batch dimension that stays open, and a check in onnxruntime."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.convert.report import Difference
from hyperball.convert.running import difference, outputs


def export_program(model: nn.Module, example: Tensor, *, dynamic_batch: bool = True) -> Any:
    """`torch.export.export` of the model in evaluation mode; with `dynamic_batch` the program takes any batch size.

    The example has a batch of at least two then, since torch takes sizes 0 and 1 for constants.
    """
    check_example(example, dynamic_batch)
    modes = {part: part.training for part in model.modules()}
    shapes = ({0: torch.export.Dim("batch", min=1)},) if dynamic_batch else None
    try:
        for part in modes:
            part.training = False
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, (example,), dynamic_shapes=shapes)
    finally:
        for part, mode in modes.items():
            part.training = mode


def export_onnx(
    model: nn.Module, example: Tensor, path: str | Path, *, dynamic_batch: bool = True, check: bool = True
) -> Difference | None:
    """Write the model as ONNX, and compare it with torch in onnxruntime on the example and on a batch of another size.

    Freeze a model first (`hyperball.freeze`): filters are then constants and BatchNorm is folded.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"`path` must end in .onnx, got {path.name!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    require("onnxscript")
    program = export_program(model, example, dynamic_batch=dynamic_batch)
    part = path.with_name(f".{path.name}.part")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
        made.save(str(part))
        gap = check_onnx(part, model, example, dynamic_batch) if check else None
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return gap


def check_onnx(path: str | Path, model: nn.Module, example: Tensor, dynamic_batch: bool = True) -> Difference:
    """The largest difference between onnxruntime and torch, on the example and, if it may vary, another batch size."""
    runtime = require("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    worst = Difference(0.0, 0.0)
    for batch in [example, *([torch.cat([example, example])[1:]] if dynamic_batch else [])]:
        expected = outputs(model, batch)
        got = [torch.from_numpy(array) for array in session.run(None, {name: batch.detach().cpu().numpy()})]
        gap = difference([tensor.cpu() for tensor in expected], got)
        worst = Difference(max(worst.absolute, gap.absolute), max(worst.relative, gap.relative))
    return worst


def check_example(example: Any, dynamic_batch: bool) -> None:
    if not isinstance(example, Tensor):
        raise TypeError(f"`example` must be a tensor, got {type(example).__name__}")
    if dynamic_batch and (example.dim() == 0 or example.shape[0] < 2):
        raise ValueError(f"`example` must have a batch of at least 2 for dynamic_batch, got {tuple(example.shape)}")


def require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} is needed for ONNX: pip install 'hyperball[export]'") from error
