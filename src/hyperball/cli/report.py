"""`report`: one page about a folder of results."""

from __future__ import annotations

from collections.abc import Sequence

from hyperball.cli.parsing import parser


def report(given: Sequence[str]) -> int:
    """`hyperball report FOLDER -o PAGE.html`."""
    options = parser("report")
    options.add_argument("folder", metavar="FOLDER", help="a folder of results or runs, searched with its subfolders")
    options.add_argument("-o", "--out", default="report.html", metavar="PAGE", help="(default: report.html)")
    options.add_argument("--title", default="Results", help="the title of the page (default: Results)")
    own = options.parse_args(given)
    from hyperball.report import read_folder, write_page
    from hyperball.report.page import check_target
    from hyperball.report.results import results_page

    found = read_folder(own.folder)
    check_target(own.out)
    write_page(own.out, results_page(found, own.title))
    for entry in found.left_out:
        print(printable(f"left out: {entry.path}: {entry.reason}"))
    left_out = f", {len(found.left_out)} left out" if found.left_out else ""
    runs, others = counted(len(found.runs), "run"), counted(len(found.records), "other record")
    print(printable(f"wrote {own.out}: {runs}, {others}{left_out}"))
    return 0


def counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def printable(text: str) -> str:
    """A text of one line, without what names of files may hold and no terminal should get."""
    return "".join(c if c.isprintable() else "?" for c in text)
