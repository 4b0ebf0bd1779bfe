"""The table of commands: what each does, one example, and the module that runs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command; `target`, "module:function" of this package, is imported when the command is called, not before.

    A `lasting` one is called for what it leaves behind, and goes on when nobody reads its output any more.
    """

    name: str
    about: str
    example: str
    target: str
    lasting: bool = False

    @property
    def description(self) -> str:
        return f"{self.about}\n\nexample:\n  {self.example}"


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "demo",
            "Train small plain and decoupled networks and write a page about them.",
            "hyperball demo",
            "demo:demo",
            lasting=True,
        ),
        Command(
            "train",
            "Train what a recipe says; every field of the recipe is an option.",
            "hyperball train recipe.yaml --model.magnitude=tanh --epochs=20 --out runs/tanh",
            "runs:train",
            lasting=True,
        ),
        Command(
            "resume",
            "Go on with a run that was interrupted.",
            "hyperball resume runs/tanh",
            "runs:resume",
            lasting=True,
        ),
        Command(
            "evaluate",
            "Measure a trained run on its test set.",
            "hyperball evaluate runs/tanh --data.outliers=0.3",
            "runs:evaluate",
        ),
        Command(
            "attack",
            "Attack a trained run, and doubt what comes out.",
            "hyperball attack runs/tanh --eps 8/255 --attacks fgsm,pgd",
            "attack:attack",
            lasting=True,
        ),
        Command(
            "grid",
            "Train every cell of a grid of recipes, several at a time, and summarize them.",
            "hyperball grid grid.yaml --jobs 2",
            "grid:grid",
            lasting=True,
        ),
        Command(
            "reproduce",
            "Train the cells of a published table and print them beside the paper's numbers.",
            "hyperball reproduce dcnet-table3 --scale quick --cells tanh,baseline",
            "reproduce:reproduce",
            lasting=True,
        ),
        Command(
            "report",
            "Write one HTML page about a folder of runs and results.",
            "hyperball report results -o report.html",
            "report:report",
            lasting=True,
        ),
        Command(
            "data",
            "Prepare and verify a data set and print its counts.",
            "hyperball data cifar10 --root data",
            "data:data",
        ),
        Command("list", "List what can be named in recipes and options.", "hyperball list magnitudes", "listing:names"),
        Command(
            "explain",
            "Say what a layer or a model computes, which kernel runs it, and why.",
            'hyperball explain "conv(3, 64, 3, magnitude=tanh)"',
            "explain:explain",
        ),
        Command(
            "convert",
            "Put decoupled convolutions, robust pooling or a projection into any model.",
            "hyperball convert timm/resnet18 --magnitude tanh --out model.safetensors",
            "models:convert",
            lasting=True,
        ),
        Command(
            "export",
            "Write the network of a run as ONNX.",
            "hyperball export runs/tanh --onnx model.onnx",
            "models:export",
            lasting=True,
        ),
        Command(
            "bench",
            "Check the layers, then time them against torch's own in the same run.",
            "hyperball bench conv train --device cuda",
            "bench:bench",
            lasting=True,
        ),
    )
}
