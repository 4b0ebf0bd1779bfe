"""The table of data sets, and loading one by its name."""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hyperball.data.download import RESOURCES, Progress, fetch
from hyperball.data.errors import DataError, MissingFiles
from hyperball.data.readers.cifar import CIFAR10, CIFAR100, read_cifar
from hyperball.data.readers.clouds import clouds
from hyperball.data.readers.digits import digits
from hyperball.data.readers.folders import FOLDER, IMAGENET_FOLDERS, IMAGEWOOF, TINY_IMAGENET, read_folder
from hyperball.data.readers.idx import FASHION, MNIST, read_idx_set
from hyperball.data.readers.modelnet import read_modelnet
from hyperball.data.samples import Dataset
from hyperball.data.summary import Summary, summarize


@dataclass(frozen=True)
class Entry:
    """A set: a line about it, and its reader of a root folder or, where it needs no files, its maker."""

    about: str
    read: Callable[[Path], Dataset] | None = None
    make: Callable[[], Dataset] | None = None
    checked: str = "sizes, labels, official checksums"
    official: tuple[int, int] | None = None
    by_hand: str = ""


SIZES = "sizes and labels"
HEADS = "labels, the head of every file, one whole image a class"
SETS = {
    "cifar10": Entry("60,000 color images of 32 x 32 pixels, 10 classes", partial(read_cifar, layout=CIFAR10)),
    "cifar100": Entry(
        "60,000 color images of 32 x 32 pixels, 100 classes", partial(read_cifar, layout=CIFAR100), checked=SIZES
    ),
    "mnist": Entry("70,000 digits of 28 x 28 pixels", partial(read_idx_set, layout=MNIST)),
    "fashion-mnist": Entry("70,000 garments of 28 x 28 pixels", partial(read_idx_set, layout=FASHION)),
    "modelnet40": Entry("12,311 clouds sampled from CAD models, 40 classes", read_modelnet, checked=SIZES),
    "imagewoof": Entry(
        "12,954 photographs of 10 breeds of dogs",
        partial(read_folder, layout=IMAGEWOOF),
        checked=HEADS,
        official=IMAGEWOOF.counts,
    ),
    "imagenet": Entry(
        "1.3 million photographs, 1,000 classes",
        partial(read_folder, layout=IMAGENET_FOLDERS),
        checked=HEADS,
        official=IMAGENET_FOLDERS.counts,
        by_hand="ask for access at https://image-net.org and lay it out as train/CLASS and val/CLASS",
    ),
    "tiny-imagenet": Entry(
        "110,000 photographs of 64 x 64 pixels, 200 classes",
        partial(read_folder, layout=TINY_IMAGENET),
        checked=HEADS,
        official=TINY_IMAGENET.counts,
    ),
    "digits": Entry("1,797 digits of 8 x 8 pixels, part of scikit-learn", make=digits, checked=SIZES),
    "clouds": Entry("2,500 procedural point clouds of 10 solids", make=clouds, checked=SIZES),
    "folder": Entry(
        "any images laid out as train/CLASS and val/CLASS",
        partial(read_folder, layout=FOLDER),
        checked=HEADS,
        by_hand="lay your images out as train/CLASS and val/CLASS",
    ),
}


def names() -> tuple[str, ...]:
    """The names that `load` and `prepare` take."""
    return tuple(SETS)


def about(name: str) -> str:
    """One line about a data set."""
    return find(name).about


def load(
    name: str, root: Path | str | None = None, *, download: bool = False, progress: Progress | None = None
) -> Dataset:
    """A data set by name, its files checked.

    Args:
        name: one of `names()`.
        root: the folder that holds the sets, or the set's own folder; by default the environment's HYPERBALL_DATA.
            digits and clouds need none.
        download: bring the official files to `root` where they are not there.
        progress: called with a file's name, the bytes received and, where known, the bytes in all.
    """
    entry = find(name)
    if entry.make is not None:
        return entry.make()
    assert entry.read is not None
    folder = root_folder(name, root)
    try:
        return entry.read(folder)
    except MissingFiles:
        if not download:
            raise
    bring(name, folder, progress)
    return entry.read(folder)


def prepare(
    name: str, root: Path | str | None = None, download: bool = False, *, progress: Progress | None = None
) -> Summary:
    """Load a set, which checks it, and count it."""
    return summarize(load(name, root, download=download, progress=progress), find(name).checked, find(name).official)


def find(name: str) -> Entry:
    """The entry of a name, or an error that suggests one."""
    if name in SETS:
        return SETS[name]
    close = difflib.get_close_matches(str(name), SETS, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(SETS)}"
    raise DataError(f"unknown data set {name!r}; {hint}")


def root_folder(name: str, root: Path | str | None) -> Path:
    chosen = root if root is not None else os.environ.get("HYPERBALL_DATA", "")
    if not str(chosen):
        raise DataError(f"{name} needs a folder of data: pass `root` (--data-root) or set HYPERBALL_DATA")
    return Path(chosen).expanduser()


def bring(name: str, root: Path, progress: Progress | None) -> None:
    """Download what is missing; files that are there but wrong are left for the reader to name."""
    if name not in RESOURCES:
        raise DataError(f"{name} cannot be downloaded; {SETS[name].by_hand}")
    for resource in RESOURCES[name]:
        fetch(resource, root, progress)
