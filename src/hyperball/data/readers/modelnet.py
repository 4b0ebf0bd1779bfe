"""ModelNet40 as HDF5 files ply_data_{train,test}*.h5: `data` [N, P, 3] in the unit sphere and `label` [N, 1]."""

import re
from pathlib import Path

import numpy as np
import torch

from hyperball.data.errors import DataError, one_line, optional
from hyperball.data.readers.files import class_names, locate, read_lines
from hyperball.data.samples import Dataset, Samples

FOLDERS = ("modelnet40_ply_hdf5_2048", "modelnet40_ply_hdf5_1024", "modelnet40")
CLASSES = 40
RADIUS = 1.01  # the unit sphere, with room for rounding


def read_modelnet(root: Path) -> Dataset:
    """Any number of files and of points a cloud; `*_files.txt` and `shape_names.txt` are followed where they exist."""
    folder = locate(root, "modelnet40", FOLDERS, "ply_data_train*.h5")
    names = class_names(folder / "shape_names.txt", CLASSES, (f"class {i}" for i in range(CLASSES)))
    train, test = (read_split(folder, split) for split in ("train", "test"))
    return Dataset("modelnet40", "points", names, train, test)


def read_split(folder: Path, split: str) -> Samples:
    paths = listed(folder, split)
    parts = [read_clouds(path) for path in paths]
    sizes = {clouds.shape[1] for clouds, _ in parts}
    if len(sizes) > 1:
        raise DataError(f"{folder}: the {split} files have clouds of {sorted(sizes)} points; they must be of one size")
    inputs, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    return Samples(torch.from_numpy(inputs), torch.from_numpy(labels))


def listed(folder: Path, split: str) -> list[Path]:
    """The files that `<split>_files.txt` names (only the last part of each name counts), or all there are."""
    index = folder / f"{split}_files.txt"
    if index.exists():
        paths = [folder / re.split(r"[/\\]", line)[-1] for line in read_lines(index)]
        for path in paths:
            if not path.exists():
                raise DataError(f"{path} is missing, but {index.name} lists it; download the set again")
    else:
        paths = sorted(folder.glob(f"ply_data_{split}*.h5"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise DataError(f"{folder} has no ply_data_{split}*.h5; download the set again")
    return paths


def read_clouds(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Clouds float32 [N, P, 3] and labels int64 [N] of one file."""
    h5py = optional("h5py")
    try:
        with h5py.File(path, "r") as file:
            missing = {"data", "label"} - set(file)
            if missing:
                raise DataError(f"{path} has no data set {sorted(missing)[0]!r}; it should hold `data` and `label`")
            clouds, labels = np.asarray(file["data"]), np.asarray(file["label"])
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(f"{path} is not a whole HDF5 file ({one_line(error)}); download it again") from error
    return check_clouds(path, clouds, labels)


def check_clouds(path: Path, clouds: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if clouds.ndim != 3 or clouds.shape[2] != 3 or not clouds.size or clouds.dtype.kind != "f":
        raise DataError(f"{path}: `data` must be floats [N, P, 3], got {clouds.dtype} {clouds.shape}")
    labels = labels.reshape(-1)
    if len(labels) != len(clouds) or labels.dtype.kind not in "iu":
        raise DataError(f"{path}: `label` must be {len(clouds)} integers, got {len(labels)} of {labels.dtype}")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(f"{path}: labels must be in 0..{CLASSES - 1}, got {labels.min()}..{labels.max()}")
    clouds = clouds.astype(np.float32, copy=False)
    radius = float(np.sqrt(np.square(clouds).sum(axis=2).max()))
    if not radius <= RADIUS:
        raise DataError(f"{path}: clouds must lie in the unit sphere, got a point at distance {radius:.4g}")
    return clouds, labels.astype(np.int64)
