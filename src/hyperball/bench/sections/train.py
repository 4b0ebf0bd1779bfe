"""Whole training steps of networks: decoupled over plain, eager and compiled; FGSM over natural training; PGD-20."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hyperball.bench.case import Aim, Case, Make, Setting
from hyperball.bench.sections.networks import NETWORKS, SIZES, attack_step, clean_step, network, training_step
from hyperball.bench.timing import Step

PLAIN, COMPILED = "plain", "plain, compiled"
NATURAL, ATTACKED = "natural", "FGSM"
CLEAN, PGD = "clean", "PGD-20"
STEPS = (("cnn9", 512), ("cnn9", 128), ("resnet32", 512), ("resnet32", 128), ("resnet18", 128))
CPU_STEPS = (("cnn9", 16), ("resnet32", 4), ("resnet18", 4))
QUICK_STEPS = (("cnn9", 4),)
MEMORY_AIM = 1.10
FGSM_AIM = 2.2
PGD_IMAGES, PGD_SECONDS = 10_000, 10.0


def time_aim(name: str, batch: int) -> float | None:
    """≤ 1.15 at batch 512 and ≤ 1.25 at batch 128, for ResNet-32 and CNN-9."""
    return {512: 1.15, 128: 1.25}.get(batch) if name in ("cnn9", "resnet32") else None


def build(
    name: str, batch: int, options: dict[str, Any], how: dict[str, bool], dtype: str, setting: Setting, sets: int
) -> list[Step]:
    model = network(name, setting, **options).train()
    size = 112 if name == "resnet18" and not setting.on_gpu else SIZES[name]
    return [training_step(model, batch, size, setting, dtype, **how)] * sets


def step_case(name: str, batch: int, dtype: str, setting: Setting) -> Case:
    """Plain, plain compiled (on a GPU) and the decoupled networks."""
    made: dict[str, Make] = {
        kind: partial(build, name, batch, options, {}, dtype, setting) for kind, options in NETWORKS.items()
    }
    references: tuple[str, ...] = (PLAIN,)
    if setting.on_gpu and not setting.quick:
        made[COMPILED] = partial(build, name, batch, {}, {"compiled": True}, dtype, setting)
        references = (PLAIN, COMPILED)
    time, ours = time_aim(name, batch), [kind for kind in NETWORKS if kind != PLAIN]
    aims: dict[tuple[str, ...], Aim] = {}
    for kind in ours if setting.on_gpu else ():
        aims[kind, PLAIN, "graph"] = Aim(time, MEMORY_AIM if time else None)
        aims[kind, COMPILED, "graph"] = Aim(time)
    return Case(
        "train",
        f"{name}, batch {batch}",
        "training step",
        dtype,
        made,
        references,
        setting.modes,
        aims,
        threads=setting.threads,
    )


def fgsm_case(name: str, batch: int, kind: str, dtype: str, setting: Setting) -> Case:
    """A step of FGSM training over a natural one, of the same network."""
    hows = {NATURAL: {}, ATTACKED: {"fgsm": True}}
    made: dict[str, Make] = {
        label: partial(build, name, batch, NETWORKS[kind], how, dtype, setting) for label, how in hows.items()
    }
    title = f"{name}, batch {batch}, {kind}"
    return Case(
        "train", title, "FGSM training step", dtype, made, (NATURAL,), setting.modes[:1],
        {(ATTACKED, NATURAL): Aim(FGSM_AIM)}, threads=setting.threads,
    )  # fmt: skip


def pgd_case(setting: Setting, count: int = PGD_IMAGES) -> Case:
    """PGD-20 on every image of a set as large as CIFAR-10's test set, over one pass through it, in TF32."""
    name = "cnn9_adv"

    def built(make: Callable[..., Step], sets: int) -> list[Step]:
        return [make(network(name, setting).eval(), count, SIZES[name], setting)] * sets

    made: dict[str, Make] = {CLEAN: partial(built, clean_step), PGD: partial(built, attack_step)}
    aims: dict[tuple[str, ...], Aim] = {(PGD, CLEAN): Aim(seconds=PGD_SECONDS)}
    return Case("train", f"{name}, {count:,} images", PGD, "tf32", made, (CLEAN,), ("eager",), aims)


def measures_pgd(setting: Setting) -> bool:
    """Minutes on a CPU, and TF32 only."""
    return setting.on_gpu and not setting.quick and setting.dtype in (None, "tf32")


def generated(setting: Setting) -> Iterator[Case]:
    dtype = setting.dtypes("bf16" if setting.on_gpu else "fp32")[0]
    steps = STEPS if setting.on_gpu else QUICK_STEPS if setting.quick else CPU_STEPS
    for name, batch in steps[:1] if setting.quick else steps:
        yield step_case(name, batch, dtype, setting)
    for kind in ("plain", "tanh + cosine"):
        yield fgsm_case(*steps[0], kind, dtype, setting)
    if measures_pgd(setting):
        yield pgd_case(setting)


def cases(setting: Setting) -> list[Case]:
    """The comparisons of this section."""
    return list(generated(setting))


def notes(setting: Setting) -> list[str]:
    left_out = [] if measures_pgd(setting) else [f"{PGD} was left out: it is measured in TF32 on a GPU without --quick"]
    if setting.on_gpu and not setting.quick:
        return left_out
    return ["the plain network was not compiled: that is measured on a GPU without --quick", *left_out]
