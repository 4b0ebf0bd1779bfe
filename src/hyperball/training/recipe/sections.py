"""The sections of a recipe: data, model, optimizer and the rest, each a frozen value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.attacks.arguments import parse_epsilon
from hyperball.training.recipe.fields import RecipeError, Section, hints

LARGEST = 1e30  # what optimizers compute from rates must not overflow float32


@dataclass(frozen=True)
class DataConfig(Section):
    """Which set, how much of it, and how its samples are varied in training (see `hyperball.data.Augment`).

    Args:
        name: one of `hyperball.data.names()`.
        train_size: samples for training, balanced over the classes; None is all of them. `test_size` likewise.
        points: the first so many points of each cloud; None is all of them.
        outliers: the share of each cloud's points, in training and in test, that random points replace once.
        crop: of images in memory, "mirror" and "zero" are those of `Augment`; of image files, None streams random parts
            of 8 to 100 %, "window" holds all in memory with 256/224 of `image_size` as their shorter side and cuts
            random squares out of the central ones. "part" resizes random parts of 8 to 100 % of what is in memory.
        image_size: side of the images that come from files.
        workers: processes that decode streamed images, or threads that decode those held in memory.
    """

    section: ClassVar[str] = "data"
    name: str = "digits"
    train_size: int | None = None
    test_size: int | None = None
    points: int | None = None
    crop: Literal["mirror", "zero", "window", "part"] | None = None
    pad: int = 4
    flip: bool = False
    cutout: int = 0
    rotate: bool = False
    jitter: float = 0.0
    outliers: float = 0.0
    image_size: int = 224
    workers: int = 4

    def check(self) -> None:
        for name in ("train_size", "test_size", "points"):
            self.require(getattr(self, name) is None or getattr(self, name) >= 1, name, ">= 1 or null")
        for name in ("pad", "cutout", "jitter", "workers"):
            self.require(getattr(self, name) >= 0, name, ">= 0")
        self.require(self.image_size >= 1, "image_size", ">= 1")
        self.require(0 <= self.outliers < 1, "outliers", "a share in [0, 1)")


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network and its operator; None leaves the choice to the model, "none" asks for nothing.

    Args:
        name: one of `hyperball.models.names()`.
        magnitude: text of a magnitude function; None is the plain network.
        options: further keyword arguments of `hyperball.models.create`.
    """

    section: ClassVar[str] = "model"
    name: str = "digits"
    magnitude: str | None = None
    angular: str = "cosine"
    weighting: Literal["none", "linear", "joint", "split"] = "none"
    norm: str | None = None
    activation: str | None = None
    pool: str | None = None
    projection: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        for name in self.options:
            if name == "num_classes" or name in hints(ModelConfig):
                proper = "data.name" if name == "num_classes" else f"model.{name}"
                raise RecipeError(f"`model.options.{name}` must be left out: `{proper}` says it")
        for name, parse in (("magnitude", radial_table.parse), ("angular", angular_table.parse)):
            text = getattr(self, name)
            try:
                if text is not None:
                    parse(text)
            except (ValueError, TypeError) as error:
                raise RecipeError(f"`model.{name}`: {error}") from None
        for name in ("angular", "weighting"):
            default = type(self).__dataclass_fields__[name].default
            if self.magnitude is None and getattr(self, name) != default:
                raise RecipeError(
                    f"`model.{name}` must be {default!r} without a `model.magnitude`, got {getattr(self, name)!r}"
                )

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `hyperball.models.create`: what was chosen, and nothing else."""
        chosen: dict[str, Any] = dict(self.options)
        if self.magnitude is not None:
            chosen.update(magnitude=self.magnitude, angular=self.angular, weighting=self.weighting)
        for name in ("norm", "activation", "pool", "projection"):
            if getattr(self, name) is not None:
                chosen[name] = None if getattr(self, name) == "none" else getattr(self, name)
        return chosen


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Adam, AdamW or SGD, what weight decay acts on, and the learning rate of radii.

    Args:
        decay: "weights" spares decoupled weights, normalization, radii and biases (`hb.optim.parameter_groups`);
            "weights+norms" decays normalization too, as the authors of Decoupled Networks do; "classifier+norms" spares
            all other weights then, of plain filters too; "all" spares nothing.
        radius_lr: the learning rate of radii and of all else that operators learn; None is `lr`.
        radius_schedule: "same" follows the schedule, "constant" does not.
    """

    section: ClassVar[str] = "optimizer"
    name: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: Literal["weights", "weights+norms", "classifier+norms", "all"] = "weights"
    radius_lr: float | None = None
    radius_schedule: Literal["same", "constant"] = "same"

    def check(self) -> None:
        self.require(0 < self.lr <= LARGEST, "lr", "> 0" if self.lr <= 0 else "at most 1e30")
        self.require(0 <= self.momentum < 1, "momentum", "in [0, 1)")
        self.require(all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)")
        self.require(self.eps > 0, "eps", "> 0")
        self.require(0 <= self.weight_decay <= 1e6, "weight_decay", "in [0, 1e6]")
        self.require(self.radius_lr is None or 0 <= self.radius_lr <= LARGEST, "radius_lr", "in [0, 1e30] or null")
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise RecipeError(
                f"`optimizer.nesterov` needs sgd with `optimizer.momentum` > 0, got {self.name} and {self.momentum:g}"
            )


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """The learning rate over time, as a factor of `optimizer.lr`.

    Args:
        unit: what `warmup`, `milestones` and `every` count.
        warmup: linear from zero over so many units.
        milestones: "step" multiplies by `gamma` at each of these; `every` does so at every multiple.
        floor: the factor at which "cosine" ends and below which "plateau" does not go.
        patience: "plateau" multiplies by `gamma` after so many evaluations without a better test loss.
    """

    section: ClassVar[str] = "schedule"
    name: Literal["constant", "step", "cosine", "plateau"] = "constant"
    unit: Literal["epochs", "steps"] = "epochs"
    warmup: float = 0.0
    milestones: tuple[float, ...] = ()
    every: float | None = None
    gamma: float = 0.1
    floor: float = 0.0
    patience: int = 5

    def check(self) -> None:
        self.require(self.warmup >= 0, "warmup", ">= 0")
        self.require(all(mark > 0 for mark in self.milestones), "milestones", "positive")
        self.require(list(self.milestones) == sorted(set(self.milestones)), "milestones", "in ascending order")
        self.require(self.every is None or self.every > 0, "every", "> 0 or null")
        self.require(0 < self.gamma < 1, "gamma", "between 0 and 1")
        self.require(0 <= self.floor <= 1, "floor", "in [0, 1]")
        self.require(self.patience >= 0, "patience", ">= 0")
        marked = bool(self.milestones) + (self.every is not None)
        if self.name == "step" and marked != 1:
            raise RecipeError('`schedule.name` "step" needs `schedule.milestones` or `schedule.every`, and not both')
        if self.name != "step" and marked:
            raise RecipeError(
                f'`schedule.milestones` and `schedule.every` are for `schedule.name` "step", got {self.name!r}'
            )


@dataclass(frozen=True)
class RegularizerConfig(Section):
    """What is added to the loss, done to gradients, or averaged.

    Args:
        clip_norm: the largest norm of the whole gradient.
        orthogonality: the factor of `hb.optim.orthogonality`, of which `orthogonality_kind` is the kind;
            `orthogonality_unit` divides filters by their norms first, as the authors do.
        weighted_gradients: where `hb.optim.WeightedGradients` acts.
        ema: decay of the exponential moving average of the weights, which is then what is evaluated.
    """

    section: ClassVar[str] = "regularizers"
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    orthogonality: float = 0.0
    orthogonality_kind: Literal["orthonormal", "orthogonal"] = "orthonormal"
    orthogonality_unit: bool = True
    weighted_gradients: Literal["none", "grad", "update"] = "none"
    ema: float | None = None

    def check(self) -> None:
        self.require(0 <= self.label_smoothing < 1, "label_smoothing", "in [0, 1)")
        self.require(self.clip_norm is None or self.clip_norm > 0, "clip_norm", "> 0 or null")
        self.require(self.orthogonality >= 0, "orthogonality", ">= 0")
        self.require(self.ema is None or 0 < self.ema < 1, "ema", "between 0 and 1, or null")


@dataclass(frozen=True)
class ProjectionConfig(Section):
    """Weight projection, `hb.optim.WeightProjection`: filters back to length `scale` every so many steps."""

    section: ClassVar[str] = "projection"
    every: int | None = None
    scale: float = 1.0

    def check(self) -> None:
        self.require(self.every is None or self.every >= 1, "every", ">= 1 or null")
        self.require(self.scale > 0, "scale", "> 0")


TAKES: dict[str, tuple[str, ...]] = {  # fields that play a part in each kind of adversarial training
    "none": (),
    "fgsm": ("epsilon", "share"),
    "fast": ("epsilon", "step", "share"),
    "pgd": ("epsilon", "step", "iterations", "share"),
    "trades": ("epsilon", "step", "iterations", "beta"),
}


@dataclass(frozen=True)
class AdversarialConfig(Section):
    """Adversarial training on images in [0, 1].

    Args:
        method: "fgsm", "fast" (FGSM from a random start), "pgd", or "trades".
        epsilon: the largest change of a pixel, a number or a text such as "8/255"; `step` is that of one iteration
            (None: fgsm ε, fast 1.25 ε, else ε/4).
        iterations: of pgd and trades.
        share: the weight of the adversarial loss; the rest is that of the clean one. TRADES takes `beta` instead.
    """

    section: ClassVar[str] = "adversarial"
    method: Literal["none", "fgsm", "fast", "pgd", "trades"] = "none"
    epsilon: float | str = 8 / 255
    step: float | str | None = None
    iterations: int = 10
    share: float = 1.0
    beta: float = 6.0

    def check(self) -> None:
        for name in ("epsilon", "step"):
            object.__setattr__(self, name, self.as_number(name))
        self.require(0 < self.budget <= 1, "epsilon", "in (0, 1], the range of pixels")
        self.require(self.step is None or self.step_size > 0, "step", "> 0 or null")
        self.require(self.iterations >= 1, "iterations", ">= 1")
        self.require(0 < self.share <= 1, "share", "in (0, 1]")
        self.require(self.beta > 0, "beta", "> 0")
        takes = TAKES[self.method]
        where = f"for {self.method}, which takes {', '.join(takes)}" if takes else "without an `adversarial.method`"
        for name in ("epsilon", "step", "iterations", "share", "beta"):
            default = type(self).__dataclass_fields__[name].default
            shown = "null" if default is None else f"{default:g}"
            self.require(name in takes or getattr(self, name) == default, name, f"{shown} {where}")

    def as_number(self, name: str) -> float | None:
        """The number of a text such as "8/255"."""
        value = getattr(self, name)
        if not isinstance(value, str):
            return value
        try:
            return parse_epsilon(value, self.dotted(name))
        except ValueError as error:
            raise RecipeError(str(error)) from None

    @property
    def budget(self) -> float:
        """`epsilon`, which is a number when it has been checked."""
        return float(self.epsilon)

    @property
    def step_size(self) -> float:
        """The step of one iteration."""
        factors = {"fgsm": 1.0, "fast": 1.25}
        return float(self.step) if self.step is not None else self.budget * factors.get(self.method, 0.25)


@dataclass(frozen=True)
class HomotopyConfig(Section):
    """From the plain network to the decoupled one over the first `steps` steps (`hb.convert.Homotopy`); 0 is off."""

    section: ClassVar[str] = "homotopy"
    steps: int = 0

    def check(self) -> None:
        self.require(self.steps >= 0, "steps", ">= 0")


@dataclass(frozen=True)
class StartConfig(Section):
    """What a run begins with.

    Args:
        weights: pretrained ones, a run's folder or a .safetensors file; radii that it lacks keep their initial values.
        statistics: "first_batch" begins the running statistics of normalization at those of the first batch, unless
            weights are of a run of the same operator, or of a file; "torch" at mean 0 and variance 1, or with weights
            at theirs.
    """

    section: ClassVar[str] = "start"
    weights: str | None = None
    statistics: Literal["first_batch", "torch"] = "first_batch"


@dataclass(frozen=True)
class EngineConfig(Section):
    """How the work is done; None means wherever it works, and a run records what was done and why.

    Args:
        compile: torch.compile of the network; None compiles plain ones, and those whose decoupled
            layers have no kernels of their own, on one GPU, from 2,000 steps on.
        capture: the whole step as one CUDA graph.
        synchronize: statistics of BatchNorm and relative radii over all processes, so that losses equal those of one.
        channels_last: memory format of images on a GPU.
    """

    section: ClassVar[str] = "engine"
    compile: bool | None = None
    capture: bool | None = None
    synchronize: bool = True
    channels_last: bool = True


STATISTICS = "statistics"  # of a condition: so many training batches for those of normalization


@dataclass(frozen=True)
class LogConfig(Section):
    """How often a run speaks and saves: losses every so many steps, the rest every so many epochs.

    Args:
        checkpoint_steps: save every so many steps too.
        evaluation_batch: samples of one batch of an evaluation; the default is the most, and fewer are taken where the
            maps of a network are large.
        norms: with the losses, lengths of filters and of their gradients in the latest step.
        conditions: further tests at every evaluation, by name: other fields of `data`, such as {"outliers": 0.5}, and
            `statistics`, the training batches over which those of normalization are computed anew for the test.
    """

    section: ClassVar[str] = "log"
    every: int = 50
    norms: bool = False
    evaluate_every: int = 1
    evaluation_batch: int = 512
    checkpoint_every: int = 1
    checkpoint_steps: int | None = None
    tensorboard: bool = False
    conditions: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        for name, changes in self.conditions.items():
            fields = changes if isinstance(changes, dict) else {}
            if not name or not fields or not all(isinstance(key, str) for key in fields):
                raise RecipeError(
                    f"`log.conditions.{name}` must map fields of `data` to other values, such as "
                    f'{{"outliers": 0.5}}, got {changes!r}'
                )
            batches = fields.get(STATISTICS, 1)
            if type(batches) is not int or batches < 1:
                raise RecipeError(
                    f"`log.conditions.{name}.{STATISTICS}` must be a number of training batches >= 1, got {batches!r}"
                )
        for name in ("every", "evaluate_every", "evaluation_batch", "checkpoint_every"):
            self.require(getattr(self, name) >= 1, name, ">= 1")
        self.require(self.checkpoint_steps is None or self.checkpoint_steps >= 1, "checkpoint_steps", ">= 1 or null")
