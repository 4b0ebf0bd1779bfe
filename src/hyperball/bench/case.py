"""One comparison: subjects that do the same work, the references among them, and the ratios aimed at."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hyperball.bench.timing import Step

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Make = Callable[[int], list[Step]]


@dataclass(frozen=True)
class Setting:
    """What a user chose: the device, one dtype for all or None for each section's own, and how long it may take."""

    device: str = "cpu"
    dtype: str | None = None
    quick: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def rounds(self) -> int:
        return 7 if self.quick else 30

    @property
    def seconds(self) -> float:
        """Time for the rounds of one comparison; three rounds are made in any case."""
        if self.on_gpu:
            return 0.5 if self.quick else 1.2
        return 0.6 if self.quick else 6.0

    @property
    def counts_of_threads(self) -> tuple[int | None, ...]:
        """On a CPU all threads and one, where the ratio holds on a busy machine too; on a GPU it does not matter."""
        return (None,) if self.on_gpu else (None, 1) if torch.get_num_threads() > 1 else (1,)

    @property
    def threads(self) -> int | None:
        """What whole networks run on: with --quick one thread, which others on the machine disturb least."""
        return 1 if self.quick and not self.on_gpu else None

    @property
    def limit(self) -> float:
        """Seconds after which no further comparison is begun."""
        return 45.0 if self.quick and not self.on_gpu else math.inf

    def dtypes(self, *own: str) -> tuple[str, ...]:
        """The dtype that was asked for, or the section's own."""
        return (self.dtype,) if self.dtype else own

    @property
    def modes(self) -> tuple[str, ...]:
        """On a GPU both sides in CUDA graphs, then both launched by Python; on a CPU eager alone."""
        return ("graph", "eager") if self.on_gpu else ("eager",)


@dataclass(frozen=True)
class Aim:
    """The greatest ratio aimed at, of times and of peak memory, and the longest time in seconds; None is no aim."""

    time: float | None = None
    memory: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Case:
    """Subjects by name; each builds its steps, one for each of so many sets of tensors.

    Every subject that is no reference is compared with every reference, and nothing else is where `pairs` names what
    is. `aims` is looked up by (subject, reference, mode), then by (subject, reference). `bytes_each` is what one set
    of tensors takes: on a GPU the sets rotate until they exceed its cache twice.
    """

    section: str
    name: str
    work: str
    dtype: str
    subjects: Mapping[str, Make]
    references: tuple[str, ...]
    modes: tuple[str, ...] = ("eager",)
    aims: Mapping[tuple[str, ...], Aim] = field(default_factory=dict)
    pairs: tuple[tuple[str, str], ...] = ()
    notes: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    kept: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    threads: int | None = None
    bytes_each: int = 2**62

    def aim(self, subject: str, reference: str, mode: str) -> Aim:
        return self.aims.get((subject, reference, mode)) or self.aims.get((subject, reference)) or Aim()

    @property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """Pairs (subject, reference)."""
        ours = [name for name in self.subjects if name not in self.references]
        return self.pairs or tuple((name, reference) for name in ours for reference in self.references)


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads inside; None leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """The case's threads, tf32 only where it is asked for, and cuDNN's choice of algorithms by trial."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = case.dtype == "tf32"
        cudnn.benchmark = True
        with threads(case.threads):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
