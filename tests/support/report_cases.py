"""Results folders for the tests of the report: synthetic records in the forms that the laboratory writes."""

import copy
import html.parser
import json
import math
import random

from hyperball.report import read_folder, render
from hyperball.report.results import results_page

RECIPE = {
    "data": {"name": "digits"},
    "model": {"name": "digits", "magnitude": "tanh", "angular": "cosine", "options": {}},
    "optimizer": {"lr": 0.001},
    "seed": 0,
}
LAST = {"step": 20, "epoch": 2.0, "samples": 100, "loss": 0.5, "top1": 0.9, "ece": 0.02}
EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
ROWS = ("baseline", "sphere", "ball", "tanh", "linear", "seg", "log", "mix")
COLUMNS = ("cosine, no relu", "cosine, relu", "square_cosine, no relu")
SHARES = (0, 10, 30, 50, 90)


def write(path, tree):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))
    return path


def record(recipe, top1=0.9):
    last = {**LAST, "top1": top1}
    return {
        "format": 1, "recipe": recipe, "status": "finished",
        "results": {"last": last, "best": {**last, "top1": top1 + 0.004}, "first_epoch": {**last, "top1": 0.5}},
        "conditions": {}, "engine": {"compiled": False, "captured": False},
        "environment": {
            "device": "cpu", "commit": "0123456789abcdef0123", "versions": {"torch": "2.8.0", "hyperball": "0.1.0"},
        },
        "timing": {"seconds": 12.5, "images_per_second": 1000.0}, "notes": [],
    }  # fmt: skip


def metrics(epochs=2, top1=0.9, speed=1.0, seed=0):
    """Lines of a run whose accuracy rises to `top1`."""
    lines, draw = [], random.Random(seed)
    for epoch in range(1, epochs + 1):
        risen = top1 if epoch == epochs else top1 * (1 - math.exp(-speed * epoch)) + draw.uniform(-0.01, 0.01)
        common = {"step": 10 * epoch, "epoch": float(epoch)}
        lines.append({"kind": "train", **common, "loss": 1.0 / epoch})
        radii = {"conv": {"min": 0.5, "mean": 1.0 + epoch / epochs, "max": 2.0}}
        radii["conv2"] = {"min": 0.5, "mean": 1.0 - 0.3 * epoch / epochs, "max": 2.0}
        lines.append({"kind": "evaluation", **common, "loss": 1.5 - risen, "top1": risen, "radii": radii})
    return "".join(json.dumps(line) + "\n" for line in lines)


def recipe_of(changes):
    """The recipe with changes whose names are dotted with two underscores."""
    recipe = copy.deepcopy(RECIPE)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = recipe
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return recipe


def make_run(folder, *, top1=0.9, finished=True, epochs=2, speed=1.0, **changes):
    """A run's folder as training leaves it."""
    recipe = recipe_of(changes)
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "metrics.jsonl").write_text(metrics(epochs, top1, speed, recipe["seed"]))
    if finished:
        (folder / "record.json").write_text(json.dumps(record(recipe, top1)))
    return folder


def number(row, column, published, values, best=(), **more):
    return {"row": row, "column": column, "published": published, "values": list(values), "best": list(best), **more}


def table_tree(name, numbers, metric="error", scale="paper", **more):
    return {
        "experiment": name, "title": f"Synthetic {name}", "source": "Nobody, An invented paper, table 0",
        "metric": metric, "scale": scale, "protocol": "an invented schedule",
        "reduction": None if scale == "paper" else "a tenth of an invented schedule", "notes": ["an invented note"],
        "numbers": numbers, **more,
    }  # fmt: skip


def cell_folder(row, column):
    def slug(text):
        return "".join(c if c.isalnum() or c in "_.=+" else "-" for c in text.lower()).replace("--", "-").strip("-")

    return f"{slug(row)}--{slug(column)}"


def make_table(folder, name="synthetic-table", rows=ROWS, columns=COLUMNS, seeds=3, scale="paper", epochs=20):
    """A table of errors with its runs."""
    draw, numbers = random.Random(7), []
    for column in columns:
        for row in rows:
            paper = round(draw.uniform(24, 34), 2)
            errors = [paper + draw.uniform(-1.0, 2.4) + 0.3 * seed for seed in range(seeds)]
            numbers.append(number(row, column, paper, errors, [error - 0.4 for error in errors]))
            changes = {"model__magnitude": None if row == "baseline" else row}
            changes |= {"model__angular": column.partition(",")[0], "model__activation": column.partition(", ")[2]}
            for seed, error in enumerate(errors):
                make_run(
                    folder / cell_folder(row, column) / f"seed-{seed}", top1=1 - error / 100, epochs=epochs, seed=seed,
                    speed=0.1 + 0.02 * len(row), **changes,
                )  # fmt: skip
    return write(folder / "table.json", table_tree(name, numbers, scale=scale))


def make_pooling(folder, rows=("max", "huber adaptive", "welsch adaptive"), seeds=2):
    """A table whose runs were tested with growing shares of outliers."""
    numbers = []
    for index, row in enumerate(rows):
        values = {
            share: [max(3.0, 88 - share * (1.1 - 0.3 * index) + seed) for seed in range(seeds)] for share in SHARES
        }
        numbers.append(number(row, "trained clean", 86.0, values[0], values[0]))
        for share, held in values.items():
            numbers.append(number(row, f"trained clean, {share} %", 86.0 - 0.8 * share, held))
        for seed in range(seeds):
            place = make_run(
                folder / cell_folder(row, "trained clean") / f"seed-{seed}", top1=values[0][seed] / 100, epochs=6,
                seed=seed, data__name="clouds", model__magnitude=None, model__pool=row.partition(" ")[0],
            )  # fmt: skip
            conditions = {f"{share} %": {"top1": values[share][seed] / 100, "loss": 1.0} for share in SHARES}
            write(place / "conditions.json", conditions)
    return write(folder / "table.json", table_tree("synthetic-pooling", numbers, "top1"))


def attack_tree(recipe, clean=0.85, doubts=()):
    entries = [{"attack": name, "accuracy": share} for name, share in (("fgsm", 0.4), ("pgd(steps=20)", 0.1))]
    return {
        "format": 1, "clean": {"accuracy": clean, "correct": "0101"}, "attacks": entries, "worst_case": 0.09,
        "checks": [], "doubts": list(doubts),
        "conditions": {
            "epsilon": 8 / 255, "epsilon_text": "8/255", "norm": "linf", "images": 1000, "seed": 0, "device": "cpu",
            "versions": {"torch": "2.8.0"}, "about": {"run": "a", "recipe": recipe},
        },
    }  # fmt: skip


def robust_cell_tree(row, column, seed, shift=0.0):
    """RUN/robustness.json as a table under attack leaves it."""
    attacks = [
        {"name": name, "attack": name, "epsilon": 8 / 255, "epsilon_text": "8/255", "norm": "linf", "images": images,
         "accuracy": share + shift, "published": paper, "withstood": "AA=="}
        for name, share, images, paper in (("fgsm", 0.4, 1000, 43.6), ("bim", 0.1, 1000, 8.9), ("auto", 0.02, 9, None))
    ]  # fmt: skip
    sweep = {"name": "fgsm", "attack": "fgsm", "images": 500, "epsilon": [0.0, 4 / 255, 8 / 255], "doubts": []}
    sweep |= {"accuracy": [0.85, 0.6, 0.4 + shift], "published": 43.6, "located": 7 / 255}
    return {
        "kind": "robust cell", "format": 1, "cell": {"row": row, "column": column, "seed": seed},
        "natural": {"accuracy": 0.85, "images": 1000, "trained": 0.86}, "attacks": attacks, "sweeps": [sweep],
        "worst_case": 0.01, "checks": [], "doubts": ["an invented doubt about masked gradients"],
        "conditions": {"device": "cpu", "norm": "linf", "versions": {"torch": "2.8.0"}}, "parts": [], "missing": [],
    }  # fmt: skip


def make_robust(folder, rows=("baseline", "tanh"), seeds=2):
    """A table under attack with its runs."""
    numbers = []
    for row in rows:
        numbers.append(number(row, "natural", 85.35, [85.0 + seed for seed in range(seeds)]))
        for name, paper in (("fgsm", 43.6), ("bim", 8.9), ("auto", None)):
            numbers.append(number(row, f"natural, {name}", paper, []))
        for seed in range(seeds):
            place = make_run(
                folder / cell_folder(row, "natural") / f"seed-{seed}", top1=0.85 + seed / 100, seed=seed,
                model__magnitude=None if row == "baseline" else row,
            )  # fmt: skip
            write(place / "robustness.json", robust_cell_tree(row, "natural", seed, 0.02 * seed))
    return write(folder / "synthetic-attacks.json", table_tree("synthetic-attacks", numbers, "top1"))


def curve_tree(slope, over="epsilon"):
    values = [0.0, 2 / 255, 4 / 255, 8 / 255, 16 / 255] if over == "epsilon" else [0.0, 0.1, 0.3, 0.5, 0.9]
    accuracies = [max(0.05, 0.9 - slope * value) for value in values]
    held = {"attack": "pgd", "norm": "linf", "images": 1000, "chance": 0.1} if over == "epsilon" else {"images": 1000}
    return {
        "kind": "robustness curve", "format": 1, "over": over, "values": values, "accuracies": accuracies,
        "conditions": held, "doubts": [],
    }  # fmt: skip


def features_tree(count=600):
    draw, points, labels = random.Random(3), [], []
    for index in range(count):
        angle, length = 2 * math.pi * (index % 10) / 10, draw.gauss(20, 6)
        points.append([length * math.cos(angle) + draw.gauss(0, 1), length * math.sin(angle) + draw.gauss(0, 1)])
        labels.append(index % 10)
    return {"kind": "features2d", "points": points, "labels": labels, "title": "Synthetic features"}


def filters_tree(count=16, side=5):
    draw = random.Random(4)
    planes = [[[[draw.random() for _ in range(side)] for _ in range(side)] for _ in range(3)] for _ in range(count)]
    return {"kind": "filters", "filters": planes, "title": "Synthetic filters"}


def curves_tree():
    xs = list(range(0, 50))
    series = [
        {"name": name, "x": xs, "y": [scale * math.exp(-x / 20) for x in xs], "band": [0.1 * scale] * len(xs)}
        for name, scale in (("standard", 1.0), ("projection", 2.0))
    ]
    return {"kind": "curves", "title": "Synthetic norms", "x_label": "step", "y_label": "norm", "series": series}


def bench_tree():
    rows = [
        {
            "section": "conv", "case": f"{size}x64x32x32", "work": "forward+backward", "mode": mode, "dtype": "bf16",
            "subject": subject, "reference": "nn.Conv2d", "median_ms": 1.2, "reference_median_ms": 1.0,
            "ratio": 1.2 + size / 1000, "aim": 1.5, "reached": True,
        }
        for mode in ("graph", "eager")
        for size in (64, 512)
        for subject in ("tanh + cosine", "linear + square_cosine")
    ]  # fmt: skip
    fits = [
        {
            "axis": "batch",
            "mode": "graph",
            "subject": name,
            "sizes": [16, 64, 256],
            "ms": [a, 4 * a, 15 * a],
            "slope": 0.98,
        }
        for name, a in (("nn.Conv2d", 0.1), ("tanh + cosine", 0.14))
    ]
    held = {"device": "Synthetic GPU", "versions": {"torch": "2.8.0"}, "statistic": "median"}
    section = {"conditions": held, "rows": rows, "notes": ["an invented note"], "fits": fits}
    return {"schema": 1, "device": "Synthetic GPU", "sections": {"conv": section}}


def claims_tree(*scales):
    """A claim about the synthetic table at each scale."""
    common = {"verdict": "in part", "found": "some do", "table": "synthetic-table"}
    claims = [{"claim": f"operators win at the scale {scale}", "scale": scale, **common} for scale in scales]
    return {"kind": "claims", "claims": claims}


def make_results(folder):
    """Every kind of record that the page knows, and one that it does not."""
    make_table(folder / "synthetic-table")
    make_table(folder / "synthetic-table-quick", columns=COLUMNS[:2], seeds=1, scale="quick", epochs=5)
    make_pooling(folder / "synthetic-pooling")
    make_robust(folder / "synthetic-robustness")
    for index, magnitude in enumerate((None, "tanh")):
        for seed in range(2):
            place = make_run(folder / "other" / f"{magnitude}" / f"seed-{seed}", seed=seed, model__magnitude=magnitude)
            recipe = recipe_of({"seed": seed, "model__magnitude": magnitude})
            doubts = ["12 % of the images have a zero gradient"] if index else []
            write(place / "attacks" / "linf-8_255.json", attack_tree(recipe, 0.85 + seed / 100, doubts))
            write(place / "attacks" / "linf-8_255-curve.json", curve_tree(15 - 5 * index + seed))
    write(folder / "pictures" / "features.json", features_tree())
    write(folder / "pictures" / "filters.json", filters_tree())
    write(folder / "pictures" / "norms.json", curves_tree())
    write(folder / "bench" / "synthetic.json", bench_tree())
    write(folder / "claims.json", claims_tree("paper", "quick"))
    (folder / "broken").mkdir()
    (folder / "broken" / "record.json").write_text('{"format": 1, "recipe"')
    return folder


class Checked(html.parser.HTMLParser):
    """Collects texts and attributes, and checks that tags are balanced."""

    VOID = {"meta", "link", "br", "input"}

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.attributes, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def parsed(text):
    reader = Checked()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def page_of(folder, title="Results"):
    return render(results_page(read_folder(folder), title))


def words_of(folder):
    return " ".join("".join(parsed(page_of(folder)).texts).split())


def section_of(folder, **wanted):
    """The one section of a folder's page that has these attributes."""
    (found,) = [
        entry
        for entry in results_page(read_folder(folder)).sections
        if all(getattr(entry, key) == value for key, value in wanted.items())
    ]
    return found
