"""`report`: one page about a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence

from hyperball.cli.parsing import UsageError, parser


def report(given: Sequence[str]) -> int:
    """`hyperball report FOLDER -o PAGE.html`."""
    options = parser("report")
    options.add_argument("folder", metavar="FOLDER", help="a folder of runs, searched with its subfolders")
    options.add_argument("-o", "--out", default="report.html", metavar="PAGE", help="(default: report.html)")
    options.add_argument("--title", default="Runs", help="the title of the page (default: Runs)")
    own = options.parse_args(given)
    from hyperball.report import read_runs, runs_page, write_page

    found = read_runs(own.folder)
    if not found.runs and not found.left_out:
        raise UsageError(f"{own.folder} holds no runs: no recipe.json, metrics.jsonl or record.json is in it or below")
    for entry in found.left_out:
        print(f"left out: {entry.path}: {entry.reason}")
    write_page(own.out, runs_page(found, own.title))
    print(f"wrote {own.out}: {len(found.runs)} runs{f', {len(found.left_out)} left out' if found.left_out else ''}")
    return 0
