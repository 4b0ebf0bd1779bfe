"""One training step: from indices to updated weights, eager, compiled, or as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from hyperball import graphs
from hyperball.convert import Homotopy
from hyperball.files import first_line
from hyperball.optim import WeightedGradients
from hyperball.training.process.engine import Decision, Engine, torch_operator
from hyperball.training.recipe import Recipe
from hyperball.training.sets import Feed
from hyperball.training.statistics import Counts
from hyperball.training.update.average import Average
from hyperball.training.update.ledger import Ledger
from hyperball.training.update.objective import Forward, Objective
from hyperball.training.update.offender import NonFiniteError, all_finite, first_offender

WARMUPS = 3
AGREEMENT = 1e-2  # a compiled gradient may be this far from the exact one, or twice as far as the eager one is


@dataclass
class Parts:
    """What a step acts on."""

    network: nn.Module
    forward: Forward
    optimizer: Any
    feed: Feed
    objective: Objective
    average: Average | None = None
    weighted: WeightedGradients | None = None
    homotopy: Homotopy | None = None
    after: list[Callable[[], None]] = field(default_factory=list)

    @property
    def inner(self) -> Optimizer:
        """The torch optimizer inside of Fabric's."""
        optimizer: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer


class Step:
    """Runs steps and counts loss and hits on the device; nothing is read back until `tally`.

    All randomness is a function of (seed, step, process): batches, of (seed, epoch, step), are copied into
    static memory before a step; dropout and attacks draw from generators that are seeded then.
    A loss that is not finite stops all further updates on the device, so that the weights stay those of that step.
    """

    def __init__(self, engine: Engine, recipe: Recipe, parts: Parts, compiled: Decision, captured: Decision) -> None:
        self.engine, self.recipe, self.parts = engine, recipe, parts
        self.compiled, self.captured = compiled, captured
        device = engine.device
        self.on_gpu = device.type == "cuda"
        on_device = [torch.cuda.default_generators[device.index or 0]] if self.on_gpu else []
        self.generators = [torch.default_generator, *on_device]
        self.ledger = Ledger(parts.feed.batch_size, device)
        self.one = torch.ones((), device=device)  # the gradient of the loss, which torch would fill anew at every step
        self.done = 0  # steps of the run
        self.steps, self.samples = 0, 0.0  # since the last report; samples of all processes
        self.graph: torch.cuda.CUDAGraph | None = None
        self.pending = True
        self.counts: Counts | None = None
        self.forward = parts.forward
        self.format = torch.channels_last if self.on_gpu and recipe.engine.channels_last else torch.contiguous_format
        if self.on_gpu and recipe.precision != "fp16":
            # Fused optimizers leave everything as it is where this flag is one.
            inner: Any = parts.inner
            inner.grad_scale, inner.found_inf = None, self.ledger.broken

    def start_from(self, step: int) -> None:
        """Count from this step on."""
        self.done = step

    @property
    def is_due(self) -> bool:
        """Whether it is time to compile and capture: at the first step, or when a homotopy has come to its end."""
        homotopy = self.parts.homotopy
        return self.pending and (self.compiled.on or self.captured.on) and (homotopy is None or homotopy.done)

    def look(self, index: int = 0) -> None:
        """Run the network over a batch of the first epoch, in training mode."""
        self.place(0, index, index)
        with self.engine.fabric.autocast():
            self.parts.network(self.batch()[0])

    def place(self, epoch: int, index: int, step: int) -> None:
        """Write what a step reads: which samples, which random numbers, which weight of the average."""
        self.parts.feed.set(epoch, index)
        self.seed(step)
        if self.parts.average is not None:
            self.parts.average.before(step)

    def seed(self, step: int) -> None:
        """What torch.manual_seed does for the devices here; it asks after those of every kind, at every step."""
        world = self.engine.world_size
        number = (self.recipe.seed * 0x9E3779B1 + step * world + self.engine.rank) % 2**63
        for generator in self.generators:
            generator.manual_seed(number)

    def __call__(self, epoch: int, index: int, step: int) -> None:
        """The step-th step of the run, the index-th of its epoch."""
        self.place(epoch, index, step)
        if self.is_due:
            self.prepare()
            self.seed(step)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()
        for act in self.parts.after:
            act()
        if self.parts.homotopy is not None and not self.parts.homotopy.done:
            self.parts.homotopy.step()
        self.done += 1
        self.steps += 1
        self.samples += self.recipe.batch_size

    def body(self) -> None:
        """Batch, loss, gradient, update, average: device work alone."""
        parts = self.parts
        inputs, labels = self.batch()
        parts.inner.zero_grad(set_to_none=True)
        loss, logits = self.loss(self.forward, inputs, labels)
        self.guard(loss.detach())
        self.engine.fabric.backward(loss, self.one)
        if parts.weighted is not None:
            parts.weighted.scale_gradients()
        if self.recipe.regularizers.clip_norm is not None:
            self.clip(self.recipe.regularizers.clip_norm)
        parts.optimizer.step()
        if parts.average is not None:
            parts.average.update()
        self.ledger.add(loss.detach(), logits.detach(), labels)

    def batch(self) -> tuple[Tensor, Tensor]:
        inputs, labels = self.parts.feed.take()
        return (inputs.contiguous(memory_format=self.format) if inputs.dim() == 4 else inputs), labels

    def loss(self, forward: Forward, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with self.counting(), self.engine.fabric.autocast():
            return self.parts.objective(forward, inputs, labels)

    def counting(self) -> AbstractContextManager[None]:
        """A pass in which layers count their batches together, where they do."""
        return nullcontext() if self.counts is None else self.counts.together()

    def clip(self, norm: float) -> None:
        fabric, parts = self.engine.fabric, self.parts
        if self.recipe.precision == "fp16":
            fabric.clip_gradients(parts.network, parts.optimizer, max_norm=norm, error_if_nonfinite=False)
        else:
            torch.nn.utils.clip_grad_norm_(parts.network.parameters(), norm)

    def guard(self, loss: Tensor) -> None:
        """Stop updates where the loss is not finite on any process; on a CPU, stop at once."""
        if self.engine.world_size > 1:
            loss = loss.clone()
            torch.distributed.all_reduce(loss)
        if self.on_gpu:
            self.ledger.watch(loss)
        elif not math.isfinite(loss.item()):
            self.explain(self.done)

    def tally(self) -> tuple[float, float]:
        """Mean loss and accuracy since the last call, over all processes; raises where a loss was not finite."""
        self.settle()
        loss, hits, samples, steps = self.interval()
        self.ledger.begin()
        self.steps, self.samples = 0, 0.0
        return loss / max(steps, 1), hits / max(samples, 1)

    def interval(self) -> list[float]:
        """Loss, hits and samples since the last report, over all processes, and the steps of each."""
        totals = self.ledger.totals()
        if self.engine.world_size > 1:
            totals = self.engine.fabric.all_reduce(totals, reduce_op="sum")
        return [*totals.tolist(), self.samples, self.steps * self.engine.world_size]

    def load_interval(self, held: list[float]) -> None:
        """Go on with an interval that was begun, by as many processes as there were."""
        loss, hits, self.samples, steps = held
        world = self.engine.world_size
        self.steps = round(self.samples / self.recipe.batch_size)
        if self.engine.is_first and steps:
            self.ledger.begin(loss * (self.steps * world / steps), hits)

    def settle(self) -> None:
        """Raise where a loss since the last report was not finite, so that no spoiled weights are saved."""
        late = self.ledger.late
        if late:
            self.explain(self.done - late)

    @torch.no_grad()
    def verify(self, step: int) -> None:
        """Raise where the weights after `step` steps, or what they make of the latest batch, are not finite.

        The weights that the last update spoiled have no loss yet, and must neither be saved nor be a result.
        """
        network, average = self.parts.network, self.parts.average
        shadows = [] if average is None else list(average.shadows.values())
        inputs = self.batch()[0]
        mode = network.training
        network.eval()
        try:
            whole = all_finite([*network.parameters(), *shadows, self.output(inputs)])
            if not self.engine.agree(int(not whole)):
                return
            where = "another process"
            if not whole:
                where = first_offender(network, inputs, lambda: self.output(inputs))
        finally:
            network.train(mode)
        raise NonFiniteError(step, self.on_process(where), "network")

    def output(self, inputs: Tensor) -> Tensor:
        with self.engine.fabric.autocast():
            logits: Tensor = self.parts.network(inputs)
        return logits

    def on_process(self, where: str) -> str:
        """A place, with the process where there are several."""
        world = self.engine.world_size
        return where if world == 1 else f"{where} (process {self.engine.rank} of {world})"

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the loss scaling of fp16, in numbers."""
        scaler = getattr(self.engine.fabric.strategy.precision, "scaler", None)
        return None if scaler is None else dict(scaler.state_dict())

    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        scaler = getattr(self.engine.fabric.strategy.precision, "scaler", None)
        if scaler is not None and state:
            scaler.load_state_dict(state)

    def explain(self, step: int) -> None:
        """Repeat the step of the first loss that was not finite, layer by layer, and raise."""
        length = len(self.parts.feed)
        self.place(step // length, step % length, step)
        inputs, labels = self.batch()
        network = self.parts.network
        where = first_offender(network, inputs, lambda: self.loss(network, inputs, labels))
        raise NonFiniteError(step, self.on_process(where))

    def prepare(self) -> None:
        """Compile, warm up and capture, falling back with a recorded reason; weights and state stay as they were."""
        self.pending = False
        snapshot, sums = Snapshot(self.parts), self.ledger.state()
        fused = self.recipe.model.magnitude is not None and not torch_operator(self.recipe.model)
        if self.engine.world_size == 1 and not fused:  # fused kernels count by the way
            self.counts = Counts(self.parts.network, lambda: self.loss(self.forward, *self.batch()))
            snapshot.restore()
        if self.compiled.on:
            self.compiled = self.try_compile()
            snapshot.restore()
        if self.captured.on:
            self.captured = self.try_capture()
            snapshot.restore()
        self.ledger.restore(sums)

    def try_compile(self) -> Decision:
        """Use the compiled network if it gives the eager one's gradients."""
        eager = self.forward
        try:
            self.forward = torch.compile(self.forward, dynamic=False)
            self.gradients(self.forward, attacked=True)  # an attack has a graph of its own
            compiled = self.gradients(self.forward)
        except Exception as failure:
            self.forward = eager
            return Decision(False, f"torch.compile failed: {first_line(failure)}")
        if draws_randomly(self.parts.network):
            return Decision(True, f"{self.compiled.reason}; not compared with eager, which draws other random numbers")
        benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # one batch is all there is
        exact = self.gradients(eager, exact=True)
        ours, theirs = distance(compiled, exact), distance(self.gradients(eager), exact)
        torch.backends.cudnn.benchmark = benchmark
        found = f"errors of gradients: compiled {ours:.1e}, eager {theirs:.1e}"
        if not ours < max(AGREEMENT, 2 * theirs):
            self.forward = eager
            return Decision(False, f"the compiled network computes something else ({found})")
        return Decision(True, f"{self.compiled.reason}; {found}")

    def gradients(self, forward: Forward, exact: bool = False, attacked: bool = False) -> list[Tensor]:
        """The gradients of the clean cross entropy of one batch, `exact` in float32, or of the recipe's whole loss."""
        inputs, labels = self.batch()
        self.parts.inner.zero_grad(set_to_none=True)
        if attacked:
            self.loss(forward, inputs, labels)[0].backward()
        else:
            with self.counting(), nullcontext() if exact else self.engine.fabric.autocast():
                self.parts.objective.cross_entropy(forward(inputs), labels).backward()
        return [p.grad.clone() for p in self.parts.network.parameters() if p.grad is not None]

    def try_capture(self) -> Decision:
        """Record `body` as a CUDA graph after a few runs of it on a side stream."""
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARMUPS):
                    self.body()
            torch.cuda.current_stream().wait_stream(side)
            self.parts.inner.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            self.graph = graphs.capture(self.body)
        except RuntimeError as failure:
            torch.cuda.synchronize()
            self.parts.inner.zero_grad(set_to_none=True)
            return Decision(False, f"the step cannot be captured: {first_line(failure)}")
        return self.captured


def distance(first: list[Tensor], second: list[Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all tensors together."""
    gap = sum(float((a - b).double().square().sum()) for a, b in zip(first, second, strict=True))
    size = sum(float(b.double().square().sum()) for b in second)
    return float((gap / size) ** 0.5) if size else float(gap > 0)


def draws_randomly(network: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p for module in network.modules())


class Snapshot:
    """Copies of all that a step changes, to be put back in place; optimizer state that was not there becomes zero."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.tensors = [(tensor, tensor.detach().clone()) for tensor in self._held()]
        self.state = {
            (parameter, entry): held.clone()
            for parameter, entries in parts.inner.state.items()
            for entry, held in entries.items()
            if isinstance(held, Tensor)
        }

    def _held(self) -> list[Tensor]:
        network, average = self.parts.network, self.parts.average
        shadows = [] if average is None else list(average.shadows.values())
        return [*network.parameters(), *network.buffers(), *shadows]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, kept in self.tensors:
            tensor.copy_(kept)
        for parameter, entries in self.parts.inner.state.items():
            for entry, held in entries.items():
                if isinstance(held, Tensor):
                    held.copy_(self.state.get((parameter, entry), torch.zeros_like(held)))
        self.parts.inner.zero_grad(set_to_none=False)
