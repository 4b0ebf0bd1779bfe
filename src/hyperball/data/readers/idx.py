"""MNIST and Fashion-MNIST: idx files, plain or gzipped. A magic number, big-endian sizes, then bytes."""

import gzip
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hyperball.data.errors import DataError, one_line
from hyperball.data.readers.files import check_official, locate, read_bytes
from hyperball.data.samples import Dataset, Samples

SPLITS = {"train": "train", "test": "t10k"}
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


@dataclass(frozen=True)
class Layout:
    """An idx set: where it lies, how its classes are called, how many samples it has and its MD5 sums, unpacked."""

    name: str
    folders: tuple[str, ...]
    classes: tuple[str, ...]
    counts: Mapping[str, int]
    md5: Mapping[str, str]
    sister_md5: Mapping[str, str]


MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FASHION_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
COUNTS = {"train": 60_000, "test": 10_000}
GARMENTS = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
MNIST = Layout("mnist", ("mnist", "MNIST/raw", "MNIST"), tuple("0123456789"), COUNTS, MNIST_MD5, FASHION_MD5)
FASHION = Layout(
    "fashion-mnist",
    ("fashion-mnist", "FashionMNIST/raw", "fashion_mnist"),
    GARMENTS,
    COUNTS,
    FASHION_MD5,
    MNIST_MD5,
)


def read_idx_set(root: Path, layout: Layout) -> Dataset:
    """The set under `root`, every file checked for its header, its size, its labels and its checksum."""
    folder = locate(root, layout.name, layout.folders, f"train-{IMAGES}*")
    train, test = (read_split(folder, split, layout) for split in SPLITS)
    return Dataset(layout.name, "images", layout.classes, train, test)


def read_split(folder: Path, split: str, layout: Layout) -> Samples:
    prefix, count = SPLITS[split], layout.counts[split]
    images = read_idx(find(folder, f"{prefix}-{IMAGES}"), (count, 28, 28), layout)
    path = find(folder, f"{prefix}-{LABELS}")
    labels = read_idx(path, (count,), layout)
    if (worst := int(labels.max())) >= len(layout.classes):
        where = int((labels >= len(layout.classes)).argmax())
        raise DataError(f"{path} has label {worst} at {where}, {layout.name} has 0..{len(layout.classes) - 1}")
    return Samples(torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64)))


def find(folder: Path, name: str) -> Path:
    """The file, plain or gzipped."""
    path = folder / name
    return path if path.exists() else folder / f"{name}.gz"


def read_idx(path: Path, shape: tuple[int, ...], layout: Layout) -> np.ndarray:
    """A uint8 array of the given shape out of an idx file."""
    content = unpack(path)
    header = 4 * (1 + len(shape))
    magic = (8, len(shape))  # 8 means unsigned bytes
    if len(content) < header or (content[0], content[1], content[2], content[3]) != (0, 0, *magic):
        found = content[:4].hex() or "nothing"
        raise DataError(f"{path} begins with {found}, an idx file of {len(shape)} dimensions with 0000080{len(shape)}")
    sizes = struct.unpack(f">{len(shape)}I", content[4:header])
    if sizes != shape:
        raise DataError(f"{path} holds an array of {text(sizes)}, {layout.name} has {text(shape)}")
    expected = header + int(np.prod(shape))
    if len(content) != expected:
        raise DataError(f"{path} has {len(content):,} bytes unpacked, its header promises {expected:,}; download again")
    check_official(path, content, layout.md5, layout.sister_md5)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def unpack(path: Path) -> bytes:
    content = read_bytes(path)
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({one_line(error)}); download it again") from error


def text(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)
