"""Cells that take no time, and records of runs that nobody trained, for the tests of runners."""

import json
import subprocess
import sys
from pathlib import Path

from hyperball.experiments.jobs.job import Job
from hyperball.files import write_json

RECORD = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
recipe = json.loads((folder / "cell.json").read_text())
(folder / "recipe.json").write_text(json.dumps(recipe))
last = {"top1": 0.5 + recipe["seed"] / 10, "loss": 1.0}
tree = dict(recipe=recipe, status="finished", results=dict(last=last, best=last, first_epoch=last), conditions={},
            engine={}, environment={}, timing=dict(seconds=1.0), notes=[], format=1)
(folder / "metrics.jsonl").write_text(json.dumps(dict(kind="evaluation", step=1, epoch=1.0, **last)) + chr(10))
(folder / "record.json").write_text(json.dumps(tree))
"""
TESTED = """
import json, pathlib, sys
(pathlib.Path(sys.argv[1]) / "conditions.json").write_text(json.dumps({"50 %": {"top1": 0.5}}))
"""
SAVES = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*arguments):
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "up").touch()
time.sleep(120)
"""


class FakeCells:
    """Stands in for `crew.start`: each cell writes a record, unless `scripts` has another text for its magnitude.

    Its further tests write a condition, unless `tests` has another text.
    """

    def __init__(self, scripts: dict) -> None:
        self.scripts = dict(scripts)
        self.tests: dict[str, str] = {}
        self.started: list[str] = []

    def __call__(self, job: Job, count: int) -> subprocess.Popen:
        write_json(job.folder / "cell.json", job.cell.recipe.to_dict())
        self.started.append(job.cell.name)
        scripts, usual = (self.scripts, RECORD) if job.trains else (self.tests, TESTED)
        script = scripts.get(job.cell.recipe.model.magnitude, usual)
        with job.log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-S", "-c", script, str(job.folder)], stdout=log, stderr=log)


def write_run(job: Job, top1: float = 0.75) -> Path:
    """The folder of a finished run: recipe, record and metrics, without weights."""
    last = {"top1": top1, "samples": 20, "epoch": 1.0, "step": 4}
    tree = {
        "recipe": job.cell.recipe.to_dict(), "status": "finished", "conditions": {}, "engine": {}, "format": 1,
        "results": {"last": last, "best": last, "first_epoch": last}, "environment": {}, "timing": {"seconds": 1.0},
    }  # fmt: skip
    write_json(job.folder / "recipe.json", job.cell.recipe.to_dict())
    write_json(job.folder / "record.json", tree)
    (job.folder / "metrics.jsonl").write_text(json.dumps({"kind": "evaluation", **last}) + "\n")
    return job.folder
