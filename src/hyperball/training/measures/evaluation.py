"""Logits of a whole split, at full speed, and their metrics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from hyperball import data, graphs
from hyperball.data import Dataset, Files, Samples
from hyperball.data.augment import to_float
from hyperball.files import first_line
from hyperball.training.measures.metrics import Metrics, measure
from hyperball.training.process.engine import Decision, Engine
from hyperball.training.recipe.sections import LogConfig

MOST_BYTES = 2**30  # of image files that are decoded once and held on the device
MOST_MAP = 2**28  # bytes of a network's largest map of one batch, unless a recipe asks for another batch
FEW = 2  # samples that its maps are measured with


class Evaluator:
    """Runs a network over a split in batches of one shape, each process its share, on one GPU as a CUDA graph.

    Image files that fit are decoded once; others are streamed every time. A `batch_size` that is the default of
    recipes is the most: the first evaluation makes it smaller where the network's maps are large. `conditions` are
    inputs, by name, that may stand in the place of a split in memory.
    """

    def __init__(
        self, engine: Engine, network: nn.Module, dataset: Dataset, batch_size: int, captured: Decision,
        options: dict[str, Any] | None = None, conditions: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.network, self.captured = engine, network, captured
        self.options, self.conditions = options or {}, conditions or {}
        self.split = decoded(dataset.test, **self.options)
        self.batch_size = max(1, min(batch_size, -(-len(self.split) // engine.world_size)))
        self.fitted = batch_size != LogConfig.evaluation_batch
        self.format = torch.channels_last if engine.device.type == "cuda" else torch.contiguous_format
        self.graph: torch.cuda.CUDAGraph | None = None
        if isinstance(self.split, Samples):
            self.samples = self.split.to(engine.device)
            if self.conditions:  # they are copied into memory whose addresses a graph knows, and which is ours
                self.samples = Samples(self.samples.inputs.clone(), self.samples.labels)
            self.index = torch.zeros(self.batch_size, dtype=torch.int64, device=engine.device)
            self.logits: Tensor | None = None

    def measure(self) -> Metrics:
        """The metrics of the split; the same on every process."""
        return measure(*self.predict())

    def measure_under(self, condition: str) -> Metrics:
        """The metrics under a condition: with its inputs, if it has any."""
        if condition not in self.conditions:
            return self.measure()
        assert isinstance(self.split, Samples)
        self.samples.inputs.copy_(self.conditions[condition])
        try:
            return self.measure()
        finally:
            self.samples.inputs.copy_(self.split.inputs)

    @torch.no_grad()
    def predict(self) -> tuple[Tensor, Tensor]:
        """Logits [N, K] and labels [N] of the whole split, on the device."""
        mode = self.network.training
        self.network.eval()
        try:
            if not self.fitted:
                self.fit()
            if isinstance(self.split, Files):
                return self.streamed(self.split)
            return self.resident()
        finally:
            self.network.train(mode)

    def fit(self) -> None:
        """The largest batch 2^k whose largest map has at most `MOST_MAP` bytes, where that is less than asked for."""
        self.fitted = True
        few = self.few()
        size = self.map_of(few)
        self.batch_size = min(self.batch_size, power_below(MOST_MAP * len(few) // max(size, 1)))
        if isinstance(self.split, Samples):
            self.index = self.index[: self.batch_size].clone()

    def map_of(self, few: Tensor) -> int:
        """The bytes in float32 of the largest map for few inputs.

        Hooks would keep blocks from running fused: they are on a copy that computes nothing, if it can be made.
        """
        with suppress(Exception):
            shadow = copy.deepcopy(self.network).to("meta")
            return largest_map(shadow, lambda: shadow(few.to("meta")))
        benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # one batch is all there is
        try:
            return largest_map(self.network, lambda: self.run(few))
        finally:
            torch.backends.cudnn.benchmark = benchmark

    def few(self) -> Tensor:
        """A few inputs such as the network is given."""
        if isinstance(self.split, Samples):
            return to_float(self.samples.inputs[:FEW])
        side = int(self.options.get("size", 224))
        return torch.zeros(FEW, 3, side, side, device=self.engine.device)

    def resident(self) -> tuple[Tensor, Tensor]:
        """This process's share of the batches; then all of them together."""
        total, size, world = len(self.split), self.batch_size, self.engine.world_size
        rounds = -(-total // (size * world))
        order = torch.arange(rounds * size * world, device=self.engine.device).clamp_(max=total - 1)
        own = order.view(world, rounds, size)[self.engine.rank]
        logits = torch.cat([self.forward(index) for index in own])
        if world > 1:
            parts = [torch.empty_like(logits) for _ in range(world)]
            torch.distributed.all_gather(parts, logits)
            logits = torch.cat(parts)
        return logits[:total], self.samples.labels

    def forward(self, index: Tensor) -> Tensor:
        self.index.copy_(index)
        if self.graph is None and self.captured.on and self.logits is not None:
            self.capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.logits = self.body()
        assert self.logits is not None
        return self.logits.clone()

    def body(self) -> Tensor:
        inputs = to_float(self.samples.inputs.index_select(0, self.index))
        return self.run(inputs)

    def run(self, inputs: Tensor) -> Tensor:
        inputs = inputs.contiguous(memory_format=self.format) if inputs.dim() == 4 else inputs
        return precise_logits(self.network, inputs, self.engine.fabric.autocast)

    def capture(self) -> None:
        """Record `body`, which ran before; without success it goes on eagerly."""

        def body() -> None:
            self.logits = self.body()

        torch.cuda.empty_cache()
        try:
            self.graph = graphs.capture(body)
        except RuntimeError as failure:
            self.captured = Decision(False, f"an evaluation cannot be captured: {first_line(failure)}")

    def streamed(self, split: Files) -> tuple[Tensor, Tensor]:
        """Every process reads all files in turn; a share each would need as many samples on all."""
        stream = data.stream(split, self.batch_size, **self.options)
        device = self.engine.device
        pairs = [
            (self.run(inputs.to(device, non_blocking=True)), labels.to(device)) for inputs, labels in stream.epoch(0)
        ]
        return torch.cat([logits for logits, _ in pairs]), torch.cat([labels for _, labels in pairs])


def decoded(split: Samples | Files, size: int = 224, workers: int = 4) -> Samples | Files:
    """Image files as the centers that a stream would give, in memory, where they fit."""
    if not isinstance(split, Files) or 3 * size**2 * len(split) > MOST_BYTES:
        return split
    return data.decode(split, size, shorter=data.shorter_side(size), workers=workers)


def largest_map(network: nn.Module, work: Callable[[], object]) -> int:
    """The bytes of the largest tensor that a module of a network gives during some work."""
    sizes = [0]

    def note(module: nn.Module, given: Any, made: Any) -> None:
        found = made if isinstance(made, tuple | list) else (made,)
        sizes.extend(tensor.nbytes for tensor in found if isinstance(tensor, Tensor))

    handles = [module.register_forward_hook(note) for module in network.modules()]
    try:
        work()
    finally:
        for handle in handles:
            handle.remove()
    return max(sizes)


def power_below(number: int) -> int:
    """The largest 2^k ≤ number, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def precise_logits(network: nn.Module, inputs: Tensor, autocast: Callable[[], AbstractContextManager[Any]]) -> Tensor:
    """Logits in float32: the last linear layer once more without autocast, where its output is what the network gives.

    Logits of eight bits would tie across samples, which average precision ranks.
    """
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda held, given, made: seen.append((held, given[0], made)))
        for module in linear[-1:]
    ]
    try:
        with autocast():
            logits: Tensor = network(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if logits.dtype != torch.float32 and seen and seen[-1][2] is logits:
        layer, features, _ = seen[-1]
        logits = layer(features.float())
    return logits.float()
