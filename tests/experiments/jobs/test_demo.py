"""The demo: a table, a page, and the same numbers every time."""

import re
import signal

import pytest

from hyperball.cli import main
from hyperball.experiments import demo as experiment
from hyperball.experiments.demo import CELLS, folder_name, pixel_outliers, sets
from hyperball.training import Interrupted

pytest.importorskip("sklearn")
pytest.importorskip("lightning_fabric")


def without_times(text):
    """A page or a print without what depends on the machine's speed."""
    return re.sub(r"\d+ s\b| *\d+\.\d+(?=\n|</span></td>\s*</tr>)", "", text)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo with one epoch and one seed, twice."""
    import contextlib
    import io

    texts, pages = [], []
    for name in ("first", "second"):
        page = tmp_path_factory.mktemp("demo") / f"{name}.html"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(["demo", "--epochs", "1", "--seeds", "1", "-o", str(page)]) == 0
        texts.append(printed.getvalue().replace(str(page), "PAGE"))
        pages.append(page.read_text())
    return texts, pages


@pytest.mark.slow
def test_the_demo_prints_a_row_for_every_network(demo):
    rows = demo[0][0].partition("\n\n")[2].splitlines()
    for cell in CELLS:
        (row,) = [line for line in rows if line.startswith(f"{cell.name}  ")]
        accuracy, first_epoch, outliers, seconds = map(float, row.removeprefix(cell.name).split())
        assert accuracy == first_epoch
        assert 0 <= outliers <= 100
        assert seconds > 0


@pytest.mark.slow
def test_the_demo_gives_the_same_numbers_every_time(demo):
    texts, pages = demo
    assert without_times(texts[0]) == without_times(texts[1])
    assert without_times(pages[0]) == without_times(pages[1])


@pytest.mark.slow
def test_the_page_has_curves_of_every_network_and_learned_radii(demo):
    page = demo[1][0]
    assert page.count('class="plot"') == 8
    assert all(cell.name in page for cell in CELLS)
    assert "Radii: tanh + cosine" in page


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_the_demo_without_a_command_that_resumes(number, code, tmp_path, capsys, monkeypatch):
    def run(*given, **options):
        raise Interrupted(3, "hyperball resume x", number)

    monkeypatch.setattr(experiment, "run", run)
    assert main(["demo", "-o", str(tmp_path / "page.html")]) == code
    assert capsys.readouterr().err == "hyperball demo: interrupted\n"


def test_cells_cover_both_sets_with_distinct_folders():
    assert {cell.data for cell in CELLS} == set(sets())
    assert len({(cell.data, folder_name(cell)) for cell in CELLS}) == len(CELLS)
    changes = [cell.changes for cell in CELLS]
    assert any(c.get("model.activation") == "none" and "model.magnitude" in c for c in changes)
    pools = {change["model.pool"].partition("(")[0] for change in changes if "model.pool" in change}
    assert {"max", "mean", "huber"} <= pools


def test_a_larger_share_of_pixel_outliers_keeps_those_of_a_smaller():
    import torch

    images = torch.rand(20, 1, 8, 8)
    few, many = pixel_outliers(images, 0.1), pixel_outliers(images, 0.5)
    changed = few != images
    assert 0.05 < changed.float().mean() < 0.15
    assert torch.equal(many[changed], few[changed])
    assert torch.equal(pixel_outliers(images, 0.0), images)
    assert many.amin() >= 0
    assert many.amax() <= 1
