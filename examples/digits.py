"""Train a small network on scikit-learn's digits, plain and decoupled, and write a page: make demo

Every row is the mean over seeds of the last epoch's test accuracy; the operators differ in nothing else.
"""

import argparse
import base64
import html
import io
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import hyperball as hb

OPERATORS: dict[str, dict[str, str] | None] = {
    "nn.Conv2d": None,
    "ball + cosine": {"magnitude": "ball"},
    "tanh + cosine": {"magnitude": "tanh"},
    "seg + cosine": {"magnitude": "seg"},
    "linear + square_cosine": {"magnitude": "linear", "angular": "square_cosine"},
}


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 images of 8×8 pixels in [-1, 1]; every third is a test image."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    y, test = torch.tensor(digits.target), torch.arange(len(x)) % 3 == 0
    return x[~test], y[~test], x[test], y[test]


def network(operator: dict[str, str] | None) -> nn.Sequential:
    """Three convolutions with BatchNorm and ReLU; a plain network and a decoupled one differ in one line."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        if operator is None:
            conv: nn.Module = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        else:
            conv = hb.nn.DecoupledConv2d(inputs, outputs, 3, padding=1, **operator)
        return [conv, nn.BatchNorm2d(outputs, momentum=0.5), nn.ReLU(inplace=True)]

    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), *head)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return 100.0 * (model(x).argmax(1) == y).float().mean().item()


def train(model: nn.Module, data: tuple[Tensor, Tensor, Tensor, Tensor], epochs: int, seed: int) -> list[float]:
    """Test accuracy after every epoch."""
    x, y, x_test, y_test = data
    optimizer = torch.optim.AdamW(hb.optim.parameter_groups(model, weight_decay=1e-2), lr=3e-3)
    order = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(x), generator=order).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        curve.append(accuracy(model, x_test, y_test))
    return curve


def run(epochs: int, seeds: int) -> dict[str, list[list[float]]]:
    """Curves by operator, one per seed."""
    data, curves = load(), {}
    for name, operator in OPERATORS.items():
        start = time.perf_counter()
        curves[name] = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = network(operator)
            curves[name].append(train(model, data, epochs, seed))
        print(f"  {name}: {seeds} seeds in {time.perf_counter() - start:.0f} s", flush=True)
    return curves


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.2f}"


def table(curves: dict[str, list[list[float]]]) -> list[tuple[str, str, str]]:
    """Operator, accuracy after the first epoch, accuracy after the last."""
    return [(name, spread([c[0] for c in runs]), spread([c[-1] for c in runs])) for name, runs in curves.items()]


def picture(curves: dict[str, list[list[float]]]) -> str:
    """The mean accuracy over epochs as a PNG in base64."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, runs in curves.items():
        mean = [statistics.mean(epoch) for epoch in zip(*runs, strict=True)]
        axes.plot(range(1, len(mean) + 1), mean, label=name, color="black" if name == "nn.Conv2d" else None)
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hyperball: digits</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem;color:#222}}
table{{border-collapse:collapse;margin:1rem 0}}
td,th{{padding:.3rem 1rem .3rem 0;text-align:left;border-bottom:1px solid #ddd}}
td+td,th+th{{text-align:right}}img{{max-width:100%}}small{{color:#666}}</style>
<h1>Digits, plain and decoupled</h1>
<p>The same three-layer network on scikit-learn's 8×8 digits; only the convolution differs.</p>
<table><tr><th>operator</th><th>after 1 epoch, %</th><th>after {epochs} epochs, %</th></tr>{rows}</table>
<img alt="test accuracy over epochs" src="data:image/png;base64,{picture}">
<p><small>Mean ± standard deviation over {seeds} seeds; the last epoch, not the best. {tested} test images: one image is
{one:.2f} %. torch {torch}, hyperball {hyperball}.</small></p></html>"""


def page(curves: dict[str, list[list[float]]], epochs: int, seeds: int) -> str:
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table(curves))
    return PAGE.format(
        rows=rows, picture=picture(curves), epochs=epochs, seeds=seeds, tested=599, one=100 / 599,
        torch=torch.__version__, hyperball=hb.__version__,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train plain and decoupled networks on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", type=Path, default=Path("demo.html"), help="where to write the page")
    options = parser.parse_args()
    if options.epochs < 1 or options.seeds < 1:
        parser.error("--epochs and --seeds must be at least 1")
    print(f"scikit-learn's digits, {options.epochs} epochs, {options.seeds} seeds:")
    curves = run(options.epochs, options.seeds)
    print(f"\n{'operator':<24}{'after 1 epoch, %':>18}{f'after {options.epochs} epochs, %':>20}")
    for name, first, last in table(curves):
        print(f"{name:<24}{first:>18}{last:>20}")
    options.report.write_text(page(curves, options.epochs, options.seeds), encoding="utf-8")
    print(f"\nwrote {options.report}: open it in a browser")


if __name__ == "__main__":
    main()
