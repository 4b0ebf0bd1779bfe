"""Training: a recipe in, a record out.

One file a concern, read in the order of a run: `recipe/`, `process/`, sets, network (pretrained, statistics), assembly,
`update/`, `measures/`, loop (progress), outcome, `storage/`; api joins them.
"""

from hyperball.training.api import evaluate, load_model, read_recipe, resume, train
from hyperball.training.measures.metrics import Metrics
from hyperball.training.process.interrupts import Interrupted, ProcessLost
from hyperball.training.progress import EvaluationReport, Progress, RunInfo, Silent, TrainReport
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import (
    AdversarialConfig,
    DataConfig,
    EngineConfig,
    HomotopyConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ProjectionConfig,
    RegularizerConfig,
    ScheduleConfig,
    StartConfig,
)
from hyperball.training.storage.checkpoint import CheckpointError
from hyperball.training.storage.record import Record, read_metrics
from hyperball.training.update.offender import NonFiniteError

__all__ = [
    "AdversarialConfig",
    "CheckpointError",
    "DataConfig",
    "EngineConfig",
    "EvaluationReport",
    "HomotopyConfig",
    "Interrupted",
    "LogConfig",
    "Metrics",
    "ModelConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "ProcessLost",
    "Progress",
    "ProjectionConfig",
    "Recipe",
    "RecipeError",
    "Record",
    "RegularizerConfig",
    "RunInfo",
    "ScheduleConfig",
    "Silent",
    "StartConfig",
    "TrainReport",
    "evaluate",
    "load_model",
    "read_metrics",
    "read_recipe",
    "resume",
    "train",
]
