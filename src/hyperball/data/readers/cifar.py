"""CIFAR-10 and CIFAR-100 in their binary form: label bytes, then the red, green and blue planes of 32 x 32."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hyperball.data.errors import DataError, MissingFiles
from hyperball.data.readers.files import check_official, class_names, locate, read_bytes
from hyperball.data.samples import Dataset, Samples

PIXELS_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """Files of a CIFAR set: records a file, label bytes a record (the last one counts), classes, known MD5 sums."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names_file: str
    label_bytes: int
    label_ranges: tuple[int, ...]
    train_records: int
    test_records: int
    archive: str
    pickled: tuple[str, ...]
    md5: Mapping[str, str] = field(default_factory=dict)

    @property
    def record(self) -> int:
        return self.label_bytes + PIXELS_BYTES

    @property
    def classes(self) -> int:
        return self.label_ranges[-1]


CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10 = Layout(
    name="cifar10",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test=("test_batch.bin",),
    names_file="batches.meta.txt",
    label_bytes=1,
    label_ranges=(10,),
    train_records=10_000,
    test_records=10_000,
    archive="cifar-10-binary.tar.gz",
    pickled=("cifar-10-batches-py", "data_batch_1"),
    md5={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
)
# The images of CIFAR-100 are also in circulation in another order, so its bytes have no one checksum.
CIFAR100 = Layout(
    name="cifar100",
    folder="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    names_file="fine_label_names.txt",
    label_bytes=2,
    label_ranges=(20, 100),
    train_records=50_000,
    test_records=10_000,
    archive="cifar-100-binary.tar.gz",
    pickled=("cifar-100-python", "meta"),
)


def read_cifar(root: Path, layout: Layout) -> Dataset:
    """The set under `root`, every file checked for its size, its labels and, where known, its checksum."""
    refuse_pickles(root, layout)
    folder = locate(root, layout.name, (layout.folder,), layout.train[0])
    default = CIFAR10_NAMES if layout.classes == 10 else (f"class {i}" for i in range(layout.classes))
    names = class_names(folder / layout.names_file, layout.classes, default)
    train = join([read_records(folder / name, layout, layout.train_records) for name in layout.train])
    test = join([read_records(folder / name, layout, layout.test_records) for name in layout.test])
    return Dataset(layout.name, "images", names, train, test)


def refuse_pickles(root: Path, layout: Layout) -> None:
    """The Python version is a pickle, which may run code when it is loaded; it is never opened."""
    folder, member = layout.pickled
    for place in (root / folder, root):
        if (place / member).exists() and not any((place / name).exists() for name in layout.train):
            if (root / layout.folder / layout.train[0]).exists():
                return
            advice = f"get the binary version, {layout.archive}"
            raise MissingFiles(
                f"{place} is the Python version of {layout.name}, pickles that are never loaded; {advice}"
            )


def read_records(path: Path, layout: Layout, records: int) -> Samples:
    """One file: label bytes and pixels of exactly `records` records."""
    content = read_bytes(path)
    if len(content) != records * layout.record:
        raise DataError(wrong_size(path, len(content), layout, records))
    table = np.frombuffer(content, np.uint8).reshape(records, layout.record)
    for column, classes in enumerate(layout.label_ranges):
        if (worst := int(table[:, column].max())) >= classes:
            record = int((table[:, column] >= classes).argmax())
            raise DataError(f"{path} has label {worst} in record {record}, {layout.name} has 0..{classes - 1} there")
    check_pairs(path, table[:, : layout.label_bytes])
    check_official(path, content, layout.md5, {})
    labels = torch.from_numpy(table[:, layout.label_bytes - 1].astype(np.int64))
    return Samples(torch.from_numpy(table[:, layout.label_bytes :].reshape(records, 3, 32, 32).copy()), labels)


def check_pairs(path: Path, labels: np.ndarray) -> None:
    """Every fine label goes with one coarse label; a file of another layout rarely has that."""
    if labels.shape[1] == 2:
        pairs = np.unique(labels, axis=0)
        twice = np.flatnonzero(np.bincount(pairs[:, 1]) > 1)
        if len(twice):
            raise DataError(f"{path} is damaged: class {twice[0]} has several coarse labels; download the set again")


def wrong_size(path: Path, size: int, layout: Layout, records: int) -> str:
    expected = f"{records * layout.record:,} ({records:,} records of {layout.record:,})"
    message = f"{path} has {size:,} bytes, {layout.name} needs {expected}"
    other = CIFAR100 if layout.label_bytes == 1 else CIFAR10
    if size and size % other.record == 0 and size % layout.record:
        return f"{message}; it looks like a file of {other.name}"
    return f"{message}; download the set again"


def join(parts: list[Samples]) -> Samples:
    return Samples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))
