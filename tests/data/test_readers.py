"""Readers of the official binary, idx and HDF5 layouts: exact bytes, every place a set may lie, every wrong file."""

import gzip
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from data_files import (
    TINY_CIFAR10,
    TINY_CIFAR100,
    TINY_FASHION,
    TINY_MNIST,
    cifar_records,
    idx_arrays,
    idx_bytes,
    random_clouds,
    write_cifar,
    write_idx,
    write_modelnet,
)

from hyperball import data
from hyperball.data import DataError, MissingFiles, catalog
from hyperball.data.readers.cifar import CIFAR10, CIFAR100, read_cifar
from hyperball.data.readers.files import md5
from hyperball.data.readers.idx import read_idx_set
from hyperball.data.readers.modelnet import read_modelnet

CIFARS = pytest.mark.parametrize("layout", [TINY_CIFAR10, TINY_CIFAR100], ids=lambda layout: layout.name)


def refused(call: Callable[[], object], *parts: str, error: type[DataError] = DataError) -> str:
    """The message of a refusal: one line that has all the parts."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


@CIFARS
@pytest.mark.parametrize("inside", [True, False])
def test_cifar_has_the_bytes_of_its_files_in_order(tmp_path: Path, layout, inside: bool) -> None:
    folder = write_cifar(tmp_path, layout)
    dataset = read_cifar(folder if inside else tmp_path, layout)
    tables = [cifar_records(layout.train_records, layout, seed) for seed in range(len(layout.train))]
    table = np.concatenate(tables)
    expected = table[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
    assert dataset.train.inputs.dtype == torch.uint8
    assert torch.equal(dataset.train.inputs, torch.from_numpy(expected))
    assert dataset.train.labels.tolist() == table[:, layout.label_bytes - 1].tolist()
    assert len(dataset.test) == layout.test_records
    assert dataset.classes[:2] == ("name 0", "name 1")
    assert dataset.kind == "images"


def test_cifar_planes_are_red_green_blue_rows_first(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, TINY_CIFAR10)
    path = folder / "test_batch.bin"
    table = np.zeros((3, 3073), np.uint8)
    table[1, 1 + 2 * 1024 + 5 * 32 + 7] = 200  # blue, row 5, column 7
    table.tofile(path)
    images = read_cifar(tmp_path, TINY_CIFAR10).test.inputs
    assert images.nonzero().tolist() == [[1, 2, 5, 7]]


@CIFARS
def test_cifar_without_names_file_still_has_names(tmp_path: Path, layout) -> None:
    (write_cifar(tmp_path, layout) / layout.names_file).unlink()
    assert len(set(read_cifar(tmp_path, layout).classes)) == layout.classes


@CIFARS
@pytest.mark.parametrize("change", [-1, 1, -3000])
def test_cifar_file_of_another_size_is_named(tmp_path: Path, layout, change: int) -> None:
    path = write_cifar(tmp_path, layout) / layout.train[-1]
    content = path.read_bytes() + b"\0"
    path.write_bytes(content[: len(content) - 1 + change])
    refused(lambda: read_cifar(tmp_path, layout), str(path), "bytes", "download the set again")


@CIFARS
def test_empty_cifar_file_is_named(tmp_path: Path, layout) -> None:
    path = write_cifar(tmp_path, layout) / layout.test[0]
    path.write_bytes(b"")
    refused(lambda: read_cifar(tmp_path, layout), str(path), "has 0 bytes")


@pytest.mark.parametrize("layout, other", [(TINY_CIFAR10, CIFAR100), (TINY_CIFAR100, CIFAR10)])
def test_file_of_the_other_cifar_is_recognized(tmp_path: Path, layout, other) -> None:
    path = write_cifar(tmp_path, layout) / layout.train[0]
    path.write_bytes(bytes(layout.train_records * other.record))
    refused(lambda: read_cifar(tmp_path, layout), str(path), f"looks like a file of {other.name}")


@pytest.mark.parametrize(
    "layout, column, value", [(TINY_CIFAR10, 0, 10), (TINY_CIFAR100, 0, 20), (TINY_CIFAR100, 1, 100)]
)
def test_cifar_label_out_of_range_is_named(tmp_path: Path, layout, column: int, value: int) -> None:
    path = write_cifar(tmp_path, layout) / layout.test[0]
    table = np.fromfile(path, np.uint8).reshape(-1, layout.record)
    table[2, column] = value
    table.tofile(path)
    refused(lambda: read_cifar(tmp_path, layout), str(path), f"label {value} in record 2")


def test_cifar100_with_a_class_of_two_coarse_labels_is_damaged(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, TINY_CIFAR100) / "train.bin"
    table = np.fromfile(path, np.uint8).reshape(-1, 3074)
    table[7, 0] = 19
    table.tofile(path)
    refused(lambda: read_cifar(tmp_path, TINY_CIFAR100), str(path), "class 7 has several coarse labels")


def test_cifar_with_a_changed_byte_fails_its_checksum(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, TINY_CIFAR10)
    path = folder / "data_batch_3.bin"
    layout = replace(TINY_CIFAR10, md5={path.name: md5(path.read_bytes())})
    read_cifar(tmp_path, layout)
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    refused(lambda: read_cifar(tmp_path, layout), str(path), "is damaged: MD5")


def test_missing_cifar_file_is_named(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, TINY_CIFAR10) / "data_batch_4.bin"
    path.unlink()
    refused(lambda: read_cifar(tmp_path, TINY_CIFAR10), str(path), "is missing", error=MissingFiles)


def test_names_file_with_too_few_names_is_refused(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, TINY_CIFAR10) / "batches.meta.txt"
    path.write_text("cat\ndog\n")
    refused(lambda: read_cifar(tmp_path, TINY_CIFAR10), str(path), "10 different classes", "got 2")


@pytest.mark.parametrize("layout, inside", [(CIFAR10, False), (CIFAR10, True), (CIFAR100, False), (CIFAR100, True)])
def test_pickled_cifar_is_refused_by_name_and_never_opened(tmp_path: Path, layout, inside: bool) -> None:
    folder, member = layout.pickled
    (tmp_path / folder).mkdir()
    bomb = tmp_path / "exploded"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (bomb,))

    (tmp_path / folder / member).write_bytes(pickle.dumps(Bomb()))
    root = tmp_path / folder if inside else tmp_path
    refused(lambda: read_cifar(root, layout), folder, "pickles that are never loaded", layout.archive)
    assert not bomb.exists()


def test_binary_cifar_beside_the_pickled_one_is_read(tmp_path: Path) -> None:
    write_cifar(tmp_path, TINY_CIFAR10)
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"")
    assert len(read_cifar(tmp_path, TINY_CIFAR10).train) == 20


def test_no_data_code_can_unpickle() -> None:
    source = Path(data.__file__).parent
    forbidden = re.compile(r"\bimport pickle|\bpickle\.|allow_pickle|torch\.load|joblib|\beval\(|\bexec\(")
    for path in source.rglob("*.py"):
        assert not forbidden.search(path.read_text()), path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
def test_mnist_has_the_bytes_of_its_files(tmp_path: Path, packed: bool, folder: str) -> None:
    write_idx(tmp_path / "root", TINY_MNIST, folder=None if folder == "." else folder, packed=packed)
    root = tmp_path / "root" / ("mnist" if folder == "." else "")
    dataset = read_idx_set(root, TINY_MNIST)
    arrays = idx_arrays(TINY_MNIST)
    assert torch.equal(dataset.test.inputs[:, 0], torch.from_numpy(arrays["t10k-images-idx3-ubyte"]))
    assert dataset.train.labels.tolist() == arrays["train-labels-idx1-ubyte"].tolist()
    assert dataset.train.inputs.shape == (12, 1, 28, 28)
    assert dataset.classes == tuple("0123456789")


def test_mnist_and_fashion_mnist_in_one_root_are_told_apart(tmp_path: Path) -> None:
    write_idx(tmp_path, TINY_MNIST)
    garments = write_idx(tmp_path, TINY_FASHION)
    labels = garments / "t10k-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.full(5, 9, np.uint8)))
    assert read_idx_set(tmp_path, TINY_FASHION).test.labels.tolist() == [9] * 5
    assert read_idx_set(tmp_path, TINY_MNIST).test.labels.tolist() == [0, 1, 2, 3, 4]


def test_files_of_the_sister_set_are_recognized_by_checksum(tmp_path: Path) -> None:
    path = write_idx(tmp_path, TINY_MNIST) / "train-images-idx3-ubyte"
    layout = replace(TINY_MNIST, md5={path.name: "0" * 32}, sister_md5={path.name: md5(path.read_bytes())})
    refused(lambda: read_idx_set(tmp_path, layout), str(path), "sister set")


BAD_IDX = {
    "empty": (lambda content: b"", "begins with nothing"),
    "a header cut short": (lambda content: content[:9], "begins with 00000803"),
    "images cut short": (lambda content: content[:-1], "its header promises"),
    "images too long": (lambda content: content + b"\0", "its header promises"),
    "labels instead of images": (lambda content: idx_bytes(np.zeros(12, np.uint8)), "begins with 00000801"),
    "floats": (lambda content: content[:2] + b"\x0d" + content[3:], "begins with 00000d03"),
    "other pixels": (lambda content: idx_bytes(np.zeros((12, 32, 32), np.uint8)), "12 x 32 x 32"),
    "other count": (lambda content: idx_bytes(np.zeros((11, 28, 28), np.uint8)), "11 x 28 x 28"),
}


@pytest.mark.parametrize("case", BAD_IDX)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_idx_file_is_named(tmp_path: Path, case: str, packed: bool) -> None:
    change, expected = BAD_IDX[case]
    path = write_idx(tmp_path, TINY_MNIST) / "train-images-idx3-ubyte"
    content = change(path.read_bytes())
    path.unlink()
    path = path.with_name(path.name + ".gz") if packed else path
    path.write_bytes(gzip.compress(content) if packed else content)
    refused(lambda: read_idx_set(tmp_path, TINY_MNIST), str(path), expected)


@pytest.mark.parametrize(
    "content", [b"", b"not gzip at all", gzip.compress(bytes(5000))[:-6]], ids=["empty", "no gzip", "cut off"]
)
def test_broken_gzip_is_named(tmp_path: Path, content: bytes) -> None:
    path = write_idx(tmp_path, TINY_MNIST, packed=True) / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(content)
    refused(lambda: read_idx_set(tmp_path, TINY_MNIST), str(path))


def test_idx_label_out_of_range_is_named(tmp_path: Path) -> None:
    path = write_idx(tmp_path, TINY_MNIST) / "t10k-labels-idx1-ubyte"
    path.write_bytes(idx_bytes(np.array([0, 1, 2, 10, 3], np.uint8)))
    refused(lambda: read_idx_set(tmp_path, TINY_MNIST), str(path), "label 10 at 3")


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("train_files, points", [(1, 1), (3, 16), (11, 5)])
def test_modelnet_reads_any_number_of_files_and_points(
    tmp_path: Path, lists: bool, train_files: int, points: int
) -> None:
    folder = write_modelnet(tmp_path, train_files=train_files, points=points, lists=lists)
    expected = np.concatenate([random_clouds(8, points, i) for i in range(train_files)])
    for root in (tmp_path, folder):
        dataset = read_modelnet(root)
        assert torch.equal(dataset.train.inputs, torch.from_numpy(expected))
        assert dataset.train.labels.tolist() == [i % 40 for i in range(8 * train_files)]
        assert dataset.kind == "points"
    assert dataset.classes[3] == ("shape 3" if lists else "class 3")


def test_modelnet_follows_the_order_of_its_list(tmp_path: Path) -> None:
    folder = write_modelnet(tmp_path)
    (folder / "train_files.txt").write_text("ply_data_train2.h5\nelsewhere\\ply_data_train0.h5\n")
    expected = np.concatenate([random_clouds(8, 16, i) for i in (2, 0)])
    assert torch.equal(read_modelnet(tmp_path).train.inputs, torch.from_numpy(expected))


def test_modelnet_file_that_is_listed_but_missing_is_named(tmp_path: Path) -> None:
    folder = write_modelnet(tmp_path)
    (folder / "ply_data_train1.h5").unlink()
    refused(lambda: read_modelnet(tmp_path), "ply_data_train1.h5 is missing", "train_files.txt")


def test_modelnet_without_test_files_is_refused(tmp_path: Path) -> None:
    folder = write_modelnet(tmp_path, lists=False)
    (folder / "ply_data_test0.h5").unlink()
    refused(lambda: read_modelnet(tmp_path), "no ply_data_test*.h5")


def rewrite(path: Path, **arrays: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


CLOUDS, LABELS = random_clouds(4, 6, 0), np.arange(4, dtype=np.uint8)[:, None]
BAD_CLOUDS = {
    "no label": ({"data": CLOUDS}, "no data set 'label'"),
    "no data": ({"label": LABELS}, "no data set 'data'"),
    "two coordinates": ({"data": CLOUDS[..., :2], "label": LABELS}, "[N, P, 3]"),
    "integers": ({"data": CLOUDS.astype(np.int32), "label": LABELS}, "must be floats"),
    "too few labels": ({"data": CLOUDS, "label": LABELS[:3]}, "4 integers, got 3"),
    "label 40": ({"data": CLOUDS, "label": LABELS + 37}, "0..39, got 37..40"),
    "negative label": ({"data": CLOUDS, "label": LABELS.astype(np.int64) - 1}, "got -1..2"),
    "NaN": ({"data": np.where(CLOUDS > 0.4, np.float32("nan"), CLOUDS), "label": LABELS}, "distance nan"),
    "outside the sphere": ({"data": 10 * CLOUDS, "label": LABELS}, "unit sphere"),
    "other points": ({"data": random_clouds(4, 7, 0), "label": LABELS}, "[7, 16] points"),
}


@pytest.mark.parametrize("case", BAD_CLOUDS)
def test_wrong_modelnet_file_is_named(tmp_path: Path, case: str) -> None:
    arrays, expected = BAD_CLOUDS[case]
    folder = write_modelnet(tmp_path)
    rewrite(folder / "ply_data_train1.h5", **arrays)
    refused(lambda: read_modelnet(tmp_path), str(folder), expected)


@pytest.mark.parametrize("keep", [0, 100, 1500])
def test_truncated_hdf5_is_named(tmp_path: Path, keep: int) -> None:
    path = write_modelnet(tmp_path) / "ply_data_test0.h5"
    path.write_bytes(path.read_bytes()[:keep])
    refused(lambda: read_modelnet(tmp_path), str(path), "not a whole HDF5 file")


READERS = [
    partial(read_cifar, layout=TINY_CIFAR10),
    partial(read_cifar, layout=TINY_CIFAR100),
    partial(read_idx_set, layout=TINY_MNIST),
    read_modelnet,
]


@pytest.mark.parametrize("read", READERS)
def test_root_that_is_missing_empty_or_a_file_is_refused(tmp_path: Path, read) -> None:
    refused(lambda: read(tmp_path / "nowhere"), "nowhere does not exist", error=MissingFiles)
    refused(lambda: read(tmp_path), str(tmp_path), "is missing", error=MissingFiles)
    file = tmp_path / "file"
    file.write_text("")
    refused(lambda: read(file), "is not a folder")


def test_load_takes_the_root_from_the_argument_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(catalog.SETS["mnist"], read=partial(read_idx_set, layout=TINY_MNIST))
    monkeypatch.setitem(catalog.SETS, "mnist", entry)
    monkeypatch.delenv("HYPERBALL_DATA", raising=False)
    refused(lambda: data.load("mnist"), "pass `root` (--data-root) or set HYPERBALL_DATA")
    write_idx(tmp_path, TINY_MNIST)
    monkeypatch.setenv("HYPERBALL_DATA", str(tmp_path))
    assert len(data.load("mnist").train) == 12
    refused(lambda: data.load("mnist", tmp_path / "elsewhere"), "elsewhere does not exist")


@pytest.mark.parametrize("name, hint", [("cifar-10", "cifar10"), ("Digits", "digits"), ("modelnet", "modelnet40")])
def test_unknown_name_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    refused(lambda: data.load(name), name, f"did you mean {hint!r}?")


def test_name_like_no_other_is_refused_with_all_names() -> None:
    refused(lambda: data.load("zzz"), *data.names())


def test_every_name_has_a_line_about_it() -> None:
    for name in data.names():
        assert 10 < len(data.about(name)) < 80


def test_summary_counts_and_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(catalog.SETS["cifar10"], read=partial(read_cifar, layout=TINY_CIFAR10))
    monkeypatch.setitem(catalog.SETS, "cifar10", entry)
    write_cifar(tmp_path, TINY_CIFAR10)
    summary = data.prepare("cifar10", tmp_path)
    assert summary.train.samples == 20
    assert summary.train.per_class == (5, 5, 5, 5, 0, 0, 0, 0, 0, 0)
    assert summary.train.bytes == 20 * 3072
    text = str(summary)
    assert "cifar10: 10 classes of images" in text
    assert "3 x 32 x 32 uint8" in text
    assert "name 3" in text
