"""One convolution against nn.Conv2d, against a naive one and against PyPI's `bcos`, at the networks' own shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hyperball.bench.case import DTYPES, Aim, Case, Make, Setting
from hyperball.bench.sections import subjects
from hyperball.bench.timing import Step

PLAIN, NAIVE, BCOS = "nn.Conv2d", "naive tanh + cosine", "bcos"
TANH, SQUARE = "tanh + cosine", "linear + square_cosine"
MAIN = (("tanh", "cosine", "none"), ("linear", "square_cosine", "none"))
OPERATORS = (
    *MAIN,
    ("tanh(per='layer')", "cosine", "none"),
    ("ball", "cosine", "none"),
    ("seg", "cosine", "none"),
    ("sphere", "cosine", "none"),
    ("log", "cosine", "none"),
    ("linear", "cosine", "none"),
    ("barron", "cosine", "none"),
    ("tanh", "cosine", "joint"),
    ("tanh", "square_cosine", "none"),
    ("tanh", "linear", "none"),
)
WORKS = {"forward": subjects.forward_step, "forward+backward": subjects.backward_step}
CPU_AIM = 1.35
FEW = 3  # operators in a round with the plain layer: in a long one it would run long before the last of them
EAGER_AIM = 1.6


@dataclass(frozen=True)
class Shape:
    """A convolution of a network: batch × inputs → outputs × size², its kernel and its stride."""

    network: str
    batch: int
    inputs: int
    outputs: int
    size: int
    kernel: int = 3
    stride: int = 1

    @property
    def name(self) -> str:
        kind = f"{self.kernel}×{self.kernel}" + (f" stride {self.stride}" if self.stride > 1 else "")
        return f"{self.network} {self.batch}×{self.inputs}→{self.outputs}×{self.size}² {kind}"

    @property
    def geometry(self) -> tuple[int, ...]:
        return self.inputs, self.outputs, self.kernel, self.stride, self.kernel // 2

    @property
    def elements(self) -> int:
        return self.batch * self.size**2 * (self.inputs + self.outputs // self.stride**2)

    def tensor(self, setting: Setting, dtype: str, seed: int = 0) -> Tensor:
        generator = torch.Generator(setting.device).manual_seed(seed)
        sizes = (self.batch, self.inputs, self.size, self.size)
        x = torch.randn(sizes, generator=generator, device=setting.device, dtype=DTYPES[dtype])
        return x.contiguous(memory_format=torch.channels_last)

    def aim(self) -> float | None:
        """≤ 1.5 at 64 to 128 channels and ≤ 1.25 from 192, for 3×3 convolutions of stride 1."""
        if self.kernel != 3 or self.stride != 1 or self.outputs < 64:
            return None
        return 1.25 if self.outputs >= 192 else 1.5


SHAPES = (
    Shape("CNN-9", 512, 64, 64, 32),
    Shape("ResNet-32", 512, 96, 96, 32),
    Shape("ResNet-32", 512, 192, 192, 16),
    Shape("ResNet-32", 512, 384, 384, 8),
    Shape("CNN-9", 512, 128, 128, 16),
    Shape("CNN-9", 512, 256, 256, 8),
    Shape("ResNet-32", 512, 96, 192, 32, 3, 2),
    Shape("ResNet-18", 128, 64, 64, 56),
    Shape("ResNet-18", 128, 128, 128, 28),
    Shape("ResNet-18", 128, 256, 256, 14),
    Shape("ResNet-18", 128, 512, 512, 7),
    Shape("ResNet-18", 128, 64, 128, 56, 3, 2),
    Shape("ResNet-18", 128, 64, 128, 56, 1, 2),
    Shape("ResNet-50", 128, 64, 256, 56, 1),
    Shape("ResNet-50", 128, 256, 64, 56, 1),
    Shape("ResNet-50", 128, 512, 512, 14, 3, 2),
    Shape("ResNet-50", 128, 2048, 512, 7, 1),
)
STUDIED = SHAPES[:4]  # other dtypes, the naive layer and bcos are measured here
BASE = Shape("CNN-9", 32, 64, 64, 32)


def ready(make: Callable[..., nn.Module], shape: Shape, setting: Setting, dtype: str) -> nn.Module:
    torch.manual_seed(0)
    return make(*shape.geometry).to(setting.device, DTYPES[dtype]).to(memory_format=torch.channels_last)


def build(
    make: Callable[..., nn.Module], shape: Shape, work: str, dtype: str, setting: Setting, sets: int
) -> list[Step]:
    layer = ready(make, shape, setting, dtype)
    return [WORKS[work](layer, shape.tensor(setting, dtype, seed)) for seed in range(sets)]


def kept(make: Callable[..., nn.Module], shape: Shape, dtype: str, setting: Setting) -> float:
    return subjects.kept_maps(ready(make, shape, setting, dtype), shape.tensor(setting, dtype))


def operator_name(magnitude: str, angular: str, weighting: str) -> str:
    return f"{magnitude} + {angular}" + ("" if weighting == "none" else f", {weighting}")


def layers_of(operators: tuple[tuple[str, str, str], ...], peers: bool) -> dict[str, Callable[..., nn.Module]]:
    """The layers to compare: plain, ours, and where asked for the naive one and bcos."""
    made: dict[str, Callable[..., nn.Module]] = {PLAIN: subjects.plain}
    made.update({operator_name(*given): subjects.decoupled(*given) for given in operators})
    if peers:
        made[NAIVE] = subjects.naive
        bcos = subjects.bcos_layer()
        made.update({BCOS: bcos} if bcos else {})
    return made


def pairs_of(names: list[str]) -> tuple[tuple[str, str], ...]:
    """Every layer against the plain one; ours against the peers that compute the same."""
    with_plain = [(name, PLAIN) for name in names if name != PLAIN]
    with_peers = [pair for pair in ((TANH, NAIVE), (SQUARE, BCOS)) if set(pair) <= set(names)]
    return (*with_plain, *with_peers)


def aims_of(names: list[str], shape: Shape, work: str, setting: Setting) -> dict[tuple[str, ...], Aim]:
    """Aims of ours against the plain layer, forward + backward."""
    ours = [name for name in names if name not in (PLAIN, NAIVE, BCOS)]
    if work != "forward+backward":
        return {}
    if not setting.on_gpu:
        return {(name, PLAIN): Aim(CPU_AIM) for name in ours} if shape == BASE else {}
    aim = shape.aim()
    if aim is None:
        return {}
    by_mode = {"graph": aim, "eager": EAGER_AIM}
    return {(name, PLAIN, mode): Aim(value) for name in ours for mode, value in by_mode.items()}


def case(
    shape: Shape, work: str, dtype: str, setting: Setting, *, operators: tuple[tuple[str, str, str], ...] = MAIN,
    peers: bool = False, threads: int | None = None, section: str = "conv",
) -> Case:  # fmt: skip
    """One shape, one kind of work, one dtype."""
    layers = layers_of(operators, peers)
    made: dict[str, Make] = {name: partial(build, make, shape, work, dtype, setting) for name, make in layers.items()}
    counted = work == "forward+backward" and not setting.on_gpu
    names = list(layers)
    return Case(
        section, shape.name + (f", {threads} thread" if threads else ""), work, dtype, made, (PLAIN,), setting.modes,
        aims_of(names, shape, work, setting), pairs_of(names), threads=threads,
        kept={name: partial(kept, make, shape, dtype, setting) for name, make in layers.items()} if counted else {},
        bytes_each=shape.elements * DTYPES[dtype].itemsize,
    )  # fmt: skip


def smaller(shape: Shape, factor: int) -> Shape:
    return replace(shape, batch=max(1, shape.batch // factor))


def gpu_cases(setting: Setting) -> Iterator[Case]:
    """bf16 at every shape; the other dtypes, the naive layer and bcos at four of them."""
    first = setting.dtypes("bf16")[0]
    for shape in STUDIED[:2] if setting.quick else SHAPES:
        for work in WORKS if shape in STUDIED else ("forward+backward",):
            yield case(shape, work, first, setting, peers=shape in STUDIED)
    for dtype in () if setting.quick or setting.dtype else ("fp16", "tf32", "fp32"):
        for shape in STUDIED[::3]:
            yield case(shape, "forward+backward", dtype, setting)


def cpu_cases(setting: Setting) -> Iterator[Case]:
    """One shape with all threads and with one, every operator; the networks' other shapes in small batches."""
    dtype = setting.dtypes("fp32")[0]
    for threads in setting.counts_of_threads[-1:] if setting.quick else setting.counts_of_threads:
        yield case(BASE, "forward+backward", dtype, setting, peers=threads == 1, threads=threads)
    for place in () if setting.quick else range(len(MAIN), len(OPERATORS), FEW):
        yield case(BASE, "forward+backward", dtype, setting, operators=OPERATORS[place : place + FEW], threads=1)
    if not setting.quick:
        yield case(BASE, "forward", dtype, setting, peers=True, threads=1)
    for shape in (SHAPES[13],) if setting.quick else SHAPES[1:]:
        yield case(smaller(shape, 32), "forward+backward", dtype, setting, threads=setting.threads)


def cases(setting: Setting) -> list[Case]:
    """The comparisons of this section."""
    return list((gpu_cases if setting.on_gpu else cpu_cases)(setting))


def notes(setting: Setting) -> list[str]:
    return [] if subjects.bcos_layer() else [subjects.BCOS_MISSING]
