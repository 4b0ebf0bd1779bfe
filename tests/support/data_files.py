"""Tiny data sets on disk in the layouts of the official ones, for the tests of the readers."""

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from hyperball.data.readers import cifar, idx

TINY_CIFAR10 = replace(cifar.CIFAR10, train_records=4, test_records=3, md5={})
TINY_CIFAR100 = replace(cifar.CIFAR100, train_records=200, test_records=100)
TINY_MNIST = replace(idx.MNIST, counts={"train": 12, "test": 5}, md5={})
TINY_FASHION = replace(idx.FASHION, counts={"train": 12, "test": 5}, md5={})


def cifar_records(n: int, layout: cifar.Layout, seed: int = 0) -> np.ndarray:
    """Records of label bytes (fine = record number, coarse = fine // 5) and random pixels."""
    rng = np.random.default_rng(seed)
    table = rng.integers(256, size=(n, layout.record), dtype=np.uint8)
    fine = np.arange(n) % layout.classes
    table[:, layout.label_bytes - 1] = fine
    if layout.label_bytes == 2:
        table[:, 0] = fine // 5
    return table


def write_cifar(root: Path, layout: cifar.Layout) -> Path:
    folder = root / layout.folder
    folder.mkdir(parents=True)
    for seed, name in enumerate(layout.train + layout.test):
        records = layout.train_records if name in layout.train else layout.test_records
        cifar_records(records, layout, seed).tofile(folder / name)
    names = [f"name {i}" for i in range(layout.classes)]
    (folder / layout.names_file).write_text("\n".join(names) + "\n\n")
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_arrays(layout: idx.Layout) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, prefix in idx.SPLITS.items():
        count = layout.counts[split]
        arrays[f"{prefix}-{idx.IMAGES}"] = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        arrays[f"{prefix}-{idx.LABELS}"] = (np.arange(count) % 10).astype(np.uint8)
    return arrays


def write_idx(root: Path, layout: idx.Layout, *, folder: str | None = None, packed: bool = False) -> Path:
    target = root / (folder or layout.folders[0])
    target.mkdir(parents=True)
    for name, array in idx_arrays(layout).items():
        if packed:
            (target / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (target / name).write_bytes(idx_bytes(array))
    return target


def random_clouds(n: int, points: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    cloud = rng.uniform(-0.5, 0.5, (n, points, 3)).astype(np.float32)
    return cloud


def write_modelnet(root: Path, *, train_files: int = 3, points: int = 16, lists: bool = True) -> Path:
    folder = root / "modelnet40_ply_hdf5_2048"
    folder.mkdir(parents=True)
    for split, files in {"train": train_files, "test": 1}.items():
        for i in range(files):
            with h5py.File(folder / f"ply_data_{split}{i}.h5", "w") as file:
                file["data"] = random_clouds(8, points, i)
                file["label"] = ((np.arange(8) + 8 * i) % 40).astype(np.uint8)[:, None]
                file["normal"] = np.zeros((8, points, 3), np.float32)
        if lists:
            lines = [f"data/{folder.name}/ply_data_{split}{i}.h5" for i in range(files)]
            (folder / f"{split}_files.txt").write_text("\n".join(lines) + "\n")
    if lists:
        (folder / "shape_names.txt").write_text("\n".join(f"shape {i}" for i in range(40)) + "\n")
    return folder


def write_image(path: Path, seed: int, size: tuple[int, int] = (24, 20), mode: str = "RGB") -> None:
    """A smooth random image, so that crops of it can be told apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(256, size=(4, 4, 3), dtype=np.uint8))
    coarse.resize(size, Image.Resampling.BICUBIC).convert(mode).save(path)


def write_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog"), *, test: str = "val") -> Path:
    """train/CLASS with 5 images each, val/CLASS with 3, of several sizes and kinds."""
    for split, count in {"train": 5, test: 3}.items():
        for label, name in enumerate(classes):
            for i in range(count):
                mode = "L" if i == 1 else "RGB"
                suffix = ".png" if i == 2 else ".JPEG"
                size = (24 + 3 * i, 20 + label)
                write_image(root / split / name / f"{i}{suffix}", 100 * label + i, size, mode)
    return root


def write_tiny_imagenet(root: Path, classes: tuple[str, ...]) -> Path:
    """train/CLASS/images, and val/images with val_annotations.txt in an order of its own."""
    folder = root / "tiny-imagenet-200"
    lines = []
    for label, name in enumerate(classes):
        write_image(folder / "train" / name / "images" / f"{name}_0.JPEG", label)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
    for i, label in enumerate(reversed(range(len(classes)))):
        write_image(folder / "val" / "images" / f"val_{i}.JPEG", i)
        lines.append(f"val_{i}.JPEG\t{classes[label]}\t0\t0\t9\t9")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "words.txt").write_text("".join(f"{name}\tword {name}, other\n" for name in classes))
    return folder
