"""Image folders: train/CLASS/*.jpg and val/CLASS/*.jpg as ImageNet and Imagewoof, and Tiny-ImageNet's annotations."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hyperball.data.errors import DataError
from hyperball.data.readers.files import locate, read_lines
from hyperball.data.samples import IMAGENET, Dataset, Files

EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"))
TEST_FOLDERS = ("val", "validation", "test")


@dataclass(frozen=True)
class Layout:
    """An image-folder set: where it lies, readable class names by the official folders, the official counts."""

    name: str
    folders: tuple[str, ...]
    classes: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    counts: tuple[int, int] | None = None


DOGS = {
    "n02086240": "Shih-Tzu",
    "n02087394": "Rhodesian_ridgeback",
    "n02088364": "beagle",
    "n02089973": "English_foxhound",
    "n02093754": "Border_terrier",
    "n02096294": "Australian_terrier",
    "n02099601": "golden_retriever",
    "n02105641": "Old_English_sheepdog",
    "n02111889": "Samoyed",
    "n02115641": "dingo",
}
IMAGEWOOF = Layout("imagewoof", ("imagewoof2", "imagewoof2-320", "imagewoof2-160"), 10, DOGS, (9_025, 3_929))
IMAGENET_FOLDERS = Layout("imagenet", ("imagenet", "ILSVRC2012", "ILSVRC2012_img"), 1000, {}, (1_281_167, 50_000))
TINY_IMAGENET = Layout("tiny-imagenet", ("tiny-imagenet-200", "tiny-imagenet"), 200, {}, (100_000, 10_000))
FOLDER = Layout("folder", ("folder",))


def read_folder(root: Path, layout: Layout) -> Dataset:
    """The files of both splits; a class is a folder of `train`, and its label its place in alphabetical order.

    Where folders have readable names in place of the official ones, the order is that of the official ones.
    """
    folder = locate(root, layout.name, layout.folders, "train")
    official = {name: key for key, name in layout.names.items()}
    classes = tuple(sorted(subfolders(folder / "train"), key=lambda name: official.get(name, name)))
    if not classes:
        raise DataError(f"{folder / 'train'} has no folders; it should have one a class")
    if layout.classes is not None and len(classes) != layout.classes:
        raise DataError(f"{folder / 'train'} has {len(classes)} classes, {layout.name} has {layout.classes}")
    train = by_class(folder / "train", classes)
    annotations = folder / "val" / "val_annotations.txt"
    test = annotated(annotations, classes) if annotations.exists() else by_class(held_out(folder), classes)
    names = readable(folder, classes, layout.names)
    return Dataset(layout.name, "images", names, train, test, IMAGENET)


def subfolders(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def held_out(folder: Path) -> Path:
    """The folder of the test split."""
    for name in TEST_FOLDERS:
        if (folder / name).is_dir() and subfolders(folder / name):
            return folder / name
    raise DataError(f"{folder / 'val'} is missing or has no folders; it should have one a class, like train")


def by_class(split: Path, classes: tuple[str, ...]) -> Files:
    """Every image below split/CLASS."""
    if extra := sorted(set(subfolders(split)) - set(classes)):
        raise DataError(f"{split / extra[0]} is a class that train does not have; both splits need the same folders")
    paths: list[Path] = []
    targets: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(images(split / name))
        if not found:
            raise DataError(f"{split / name} has no images; every class needs some in both splits")
        paths += found
        targets += [label] * len(found)
    return Files(tuple(paths), tuple(targets))


def images(folder: Path) -> Iterator[Path]:
    """The images of a folder and of the folders in it (Tiny-ImageNet keeps them in CLASS/images)."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in files:
            if os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith("."):
                yield Path(place, name)


def annotated(annotations: Path, classes: tuple[str, ...]) -> Files:
    """Tiny-ImageNet's validation images, whose classes stand in val_annotations.txt."""
    labels = {name: label for label, name in enumerate(classes)}
    folder = annotations.parent / "images"
    present = {path.name for path in images(folder)} if folder.is_dir() else set()
    paths: list[Path] = []
    targets: list[int] = []
    for number, line in enumerate(read_lines(annotations), 1):
        image, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in labels:
            raise DataError(f"{annotations} line {number} names class {name!r}, which train does not have")
        if image not in present:
            raise DataError(f"{folder / image} is missing, but {annotations.name} lists it; unpack the set again")
        paths.append(folder / image)
        targets.append(labels[name])
    if not paths:
        raise DataError(f"{annotations} is empty; unpack the set again")
    return Files(tuple(paths), tuple(targets))


def readable(folder: Path, classes: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    """Class names from the layout's table or from Tiny-ImageNet's words.txt, else the folders' names."""
    words = folder / "words.txt"
    if words.exists():
        lines = (line.partition("\t") for line in read_lines(words))
        names = {key: value.partition(",")[0] for key, _, value in lines}
    found = tuple(names.get(name, name) for name in classes)
    return found if len(set(found)) == len(found) else classes
