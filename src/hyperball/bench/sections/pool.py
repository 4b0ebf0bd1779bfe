"""Robust pooling against x.mean(-1) and x.amax(-1), an eager iteration, and a joint LBFGS as peers solve it.

And robust batch normalization against nn.BatchNorm2d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from hyperball import radial
from hyperball.bench.case import DTYPES, Aim, Case, Make, Setting
from hyperball.bench.sections.subjects import backward_step
from hyperball.bench.timing import Step
from hyperball.functional import robust_pool
from hyperball.nn import RobustBatchNorm2d
from hyperball.rows import Value

SHAPES = ((24, 1024, 2048), (128, 512, 49))
CPU_SHAPES = ((16, 512, 49), (2, 512, 1024))
PENALTIES = ("huber", "pseudo_huber", "welsch")
GPU_AIM = {"huber": 3.0, "pseudo_huber": 3.0, "welsch": 8.0}
CPU_AIM = {"huber": 8.0, "pseudo_huber": 8.0}
LBFGS_AIM = {"huber": 1 / 30, "pseudo_huber": 1 / 30, "welsch": 1 / 10}
OUTLIERS = 0.1
ITERATIONS = 10
NORM_SHAPES = ((512, 64, 32, 32), (128, 256, 8, 8))
CPU_NORM_SHAPES = ((32, 64, 16, 16),)
NORM_PENALTIES = ("huber", "pseudo_huber")
BATCH_NORM = "nn.BatchNorm2d"
MEAN, MAX, NAIVE, LBFGS = "x.mean(-1)", "x.amax(-1)", "naive huber", "joint LBFGS"
Pool = Callable[[Tensor], Tensor]


def samples(shape: tuple[int, ...], setting: Setting, dtype: str, seed: int = 0) -> Tensor:
    """Normal samples, one in ten of them moved away by about 5."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=setting.device)
    far = torch.rand(shape, generator=generator, device=setting.device) < OUTLIERS
    return (x + 5.0 * far).to(DTYPES[dtype])


def penalty(name: str) -> Value:
    value = radial.parse(name, "penalty")
    assert isinstance(value, Value)
    return value


def ours(name: str) -> Pool:
    value = penalty(name)
    return lambda x: robust_pool(x, penalty=value)


def naive_huber(x: Tensor) -> Tensor:
    """y = Σ w·x / Σ w with w = min(1, 1/|y − x|), ten times from the mean, through autograd."""
    y = x.mean(-1, keepdim=True)
    for _ in range(ITERATIONS):
        weight = 1 / (y - x).abs().clamp_min(1.0)
        y = (weight * x).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
    return y.squeeze(-1)


def joint_lbfgs(name: str) -> Pool:
    """y = argmin Σ over all rows at once of phi(y − x), by torch.optim.LBFGS: 100 iterations, both tolerances 0."""
    value = penalty(name)

    def pool(x: Tensor) -> Tensor:
        y = x.mean(-1).requires_grad_()
        optimizer = torch.optim.LBFGS([y], lr=1.0, max_iter=100, tolerance_grad=0.0, tolerance_change=0.0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = value.row.phi(y.unsqueeze(-1) - x, **value.parameters).sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        return y.detach()

    return pool


def residual(y: Tensor, x: Tensor, value: Value) -> float:
    """max over rows of |Σ phi'(y − x)|, in float64."""
    z = y.double().unsqueeze(-1) - x.double()
    return float((radial.gain(value, z.abs()) * z).sum(-1).abs().max())


def build(pool: Pool, shape: tuple[int, ...], work: str, dtype: str, setting: Setting, sets: int) -> list[Step]:
    return [step_of(pool, samples(shape, setting, dtype, seed), work) for seed in range(sets)]


def step_of(pool: Pool, x: Tensor, work: str) -> Step:
    if work == "forward":

        def forward() -> None:
            with torch.no_grad():
                pool(x)

        return forward
    x = x.requires_grad_()
    grad = torch.randn_like(x[..., 0])

    def both() -> None:
        torch.autograd.grad(pool(x), x, grad)

    return both


def against_mean(shape: tuple[int, ...], work: str, dtype: str, setting: Setting, threads: int | None = None) -> Case:
    pools: dict[str, Pool] = {MEAN: lambda x: x.mean(-1), MAX: lambda x: x.amax(-1)}
    pools |= {name: ours(name) for name in PENALTIES} | {NAIVE: naive_huber}
    made: dict[str, Make] = {name: partial(build, pool, shape, work, dtype, setting) for name, pool in pools.items()}
    aims = GPU_AIM if setting.on_gpu else CPU_AIM
    mode = setting.modes[0]  # in graphs on a GPU: launched by Python, a mean of 17 µs is the time of its launch
    wanted: dict[tuple[str, ...], Aim] = {
        (name, MEAN, mode): Aim(aim) for name, aim in aims.items() if work == "forward"
    }
    pairs = (*((name, MEAN) for name in pools if name != MEAN), ("huber", MAX), ("huber", NAIVE))
    bytes_each = torch.Size(shape).numel() * DTYPES[dtype].itemsize
    title = "×".join(map(str, shape)) + (f", {threads} thread" if threads else "")
    return Case(
        "pool", title, work, dtype, made, (MEAN,), setting.modes, wanted, pairs, threads=threads,
        bytes_each=bytes_each,
    )  # fmt: skip


def residuals(name: str, shape: tuple[int, ...], setting: Setting) -> str:
    """How well ours and the LBFGS solve: for welsch the latter may end in another minimum."""
    x, value = samples(shape, setting, "fp32"), penalty(name)
    found = [residual(pool(x), x, value) for pool in (ours(name), joint_lbfgs(name))]
    return f"max |Σ phi'| {found[0]:.1e}, of the LBFGS {found[1]:.1e}"


def against_lbfgs(name: str, shape: tuple[int, ...], setting: Setting) -> Case:
    """Ours over the joint LBFGS, with both residuals in the note."""
    pools = {LBFGS: joint_lbfgs(name), name: ours(name)}
    made: dict[str, Make] = {
        label: partial(build, pool, shape, "forward", "fp32", setting) for label, pool in pools.items()
    }
    aims: dict[tuple[str, ...], Aim] = {(name, LBFGS): Aim(LBFGS_AIM[name])}
    notes = {name: partial(residuals, name, shape, setting)}
    title = "×".join(map(str, shape)) + ", 1 thread"
    return Case("pool", title, "forward", "fp32", made, (LBFGS,), ("eager",), aims, notes=notes, threads=1)


def build_norm(
    layer: Callable[[int], nn.Module], shape: tuple[int, ...], dtype: str, setting: Setting, sets: int
) -> list[Step]:
    """Forward and backward of a normalization in training, with channels last."""
    made = layer(shape[1]).to(setting.device).train()
    inputs = [samples(shape, setting, dtype, seed).to(memory_format=torch.channels_last) for seed in range(sets)]
    return [backward_step(made, x) for x in inputs]


def against_batch_norm(shape: tuple[int, ...], dtype: str, setting: Setting, threads: int | None = None) -> Case:
    """RobustBatchNorm2d over nn.BatchNorm2d; no ratio is aimed at."""
    layers: dict[str, Callable[[int], nn.Module]] = {BATCH_NORM: nn.BatchNorm2d}
    layers |= {f"RobustBatchNorm2d, {name}": partial(RobustBatchNorm2d, penalty=name) for name in NORM_PENALTIES}
    made: dict[str, Make] = {name: partial(build_norm, layer, shape, dtype, setting) for name, layer in layers.items()}
    batch, channels, height, _ = shape
    title = f"batch norm {batch}×{channels}×{height}²" + (f", {threads} thread" if threads else "")
    bytes_each = torch.Size(shape).numel() * DTYPES[dtype].itemsize
    return Case(
        "pool", title, "forward+backward", dtype, made, (BATCH_NORM,), setting.modes, threads=threads,
        bytes_each=bytes_each,
    )  # fmt: skip


def generated(setting: Setting) -> Iterator[Case]:
    dtypes = setting.dtypes(*(("fp32", "bf16") if setting.on_gpu and not setting.quick else ("fp32",)))
    for dtype in dtypes:
        shapes = SHAPES if setting.on_gpu else CPU_SHAPES
        for shape in shapes[:1] if setting.quick else shapes:
            for work in ("forward", "forward+backward"):
                for threads in setting.counts_of_threads[-1:] if setting.quick else setting.counts_of_threads:
                    yield against_mean(shape, work, dtype, setting, threads)
        sizes = NORM_SHAPES if setting.on_gpu else CPU_NORM_SHAPES
        for size in sizes[:1] if setting.quick else sizes:
            yield against_batch_norm(size, dtype, setting, None if setting.on_gpu else 1)
    for name in PENALTIES if not setting.on_gpu and not setting.quick else ():
        yield against_lbfgs(name, CPU_SHAPES[0], setting)


def cases(setting: Setting) -> list[Case]:
    """The comparisons of this section."""
    return list(generated(setting))


def notes(setting: Setting) -> list[str]:
    skipped = setting.on_gpu or setting.quick
    return ["the joint LBFGS is measured on a CPU without --quick"] if skipped else []
