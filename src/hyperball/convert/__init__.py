"""Any model in, a decoupled, robust or projected one out, with a report."""

from hyperball.convert.bcos import load_bcos
from hyperball.convert.calibration import Calibration, calibrate
from hyperball.convert.export import check_onnx, export_onnx, export_program
from hyperball.convert.fusing import fuse_blocks
from hyperball.convert.heads import ProjectedLinear, make_projection
from hyperball.convert.homotopy import Homotopy
from hyperball.convert.model import convert_model
from hyperball.convert.report import Difference, Kept, Replaced, Report
from hyperball.convert.storage import load, load_state, read, save

__all__ = [
    "Calibration",
    "Difference",
    "Homotopy",
    "Kept",
    "ProjectedLinear",
    "Replaced",
    "Report",
    "calibrate",
    "check_onnx",
    "convert_model",
    "export_onnx",
    "export_program",
    "fuse_blocks",
    "load",
    "load_bcos",
    "load_state",
    "make_projection",
    "read",
    "save",
]
