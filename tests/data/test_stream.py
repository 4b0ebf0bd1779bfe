"""Image folders: their layouts and mistakes, and streams whose samples depend on seed, epoch and index alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import write_folder, write_image, write_tiny_imagenet
from PIL import Image

from hyperball.data import Augment, DataError, Samples, decode, load, prepare, stream
from hyperball.data.readers.folders import DOGS, FOLDER, IMAGEWOOF, TINY_IMAGENET, read_folder

WORDS = ("n01", "n02", "n03")
TINY = replace(TINY_IMAGENET, classes=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"))


def test_folder_lists_every_image_with_the_label_of_its_class(folder: Path) -> None:
    dataset = load("folder", folder)
    assert dataset.classes == ("cat", "dog")
    assert [path.relative_to(folder / "train").parent.name for path in dataset.train.paths] == ["cat"] * 5 + ["dog"] * 5
    assert dataset.train.labels.tolist() == [0] * 5 + [1] * 5
    assert len(dataset.test) == 6


@pytest.mark.parametrize("test", ["val", "validation", "test"])
def test_held_out_folder_may_have_several_names(tmp_path: Path, test: str) -> None:
    write_folder(tmp_path, test=test)
    assert len(load("folder", tmp_path).test) == 6


def test_imagewoof_has_readable_names_for_the_official_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "imagewoof2-320", tuple(DOGS))
    dataset = read_folder(tmp_path, IMAGEWOOF)
    assert dataset.classes[0] == "Shih-Tzu"
    assert len(set(dataset.classes)) == 10


def test_imagewoof_with_folders_of_readable_names_has_the_official_order(tmp_path: Path) -> None:
    write_folder(tmp_path / "official" / "imagewoof2", tuple(DOGS))
    write_folder(tmp_path / "readable" / "imagewoof2", tuple(DOGS.values()))
    official, readable = (read_folder(tmp_path / name, IMAGEWOOF) for name in ("official", "readable"))
    assert official.classes == readable.classes == tuple(DOGS.values()) != tuple(sorted(DOGS.values()))
    for split in ("train", "test"):
        folders = [path.parent.name for path in getattr(readable, split).paths]
        assert folders == [readable.classes[label] for label in getattr(readable, split).labels.tolist()]
        assert torch.equal(getattr(official, split).labels, getattr(readable, split).labels)


def test_tiny_imagenet_takes_its_validation_labels_from_the_annotations(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path, WORDS)
    for root in (tmp_path, folder):
        dataset = read_folder(root, TINY)
        assert [path.name for path in dataset.test.paths] == ["val_0.JPEG", "val_1.JPEG", "val_2.JPEG"]
        assert dataset.test.labels.tolist() == [2, 1, 0]
        assert dataset.train.labels.tolist() == [0, 1, 2]
        assert dataset.classes == ("word n01", "word n02", "word n03")


def test_tiny_imagenet_sorted_into_class_folders_is_read_too(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny-imagenet-200", WORDS)
    assert len(read_folder(tmp_path, TINY).test) == 9


def remove(path: Path) -> None:
    for child in path.iterdir():
        child.unlink()
    path.rmdir()


BAD_FOLDERS = {
    "a class without images": (lambda root: [p.unlink() for p in (root / "train" / "dog").iterdir()], "has no images"),
    "a class missing from val": (lambda root: remove(root / "val" / "dog"), "val/dog has no images"),
    "a class only in val": (
        lambda root: write_image(root / "val" / "cow" / "0.png", 0),
        "val/cow is a class that train",
    ),
    "no val": (lambda root: (root / "val").rename(root / "later"), "val is missing"),
    "no train": (lambda root: (root / "train").rename(root / "later"), "train is missing"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_wrong_folder_is_named(tmp_path: Path, case: str) -> None:
    change, message = BAD_FOLDERS[case]
    change(write_folder(tmp_path))
    with pytest.raises(DataError, match=message):
        load("folder", tmp_path)


def test_wrong_number_of_classes_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "imagewoof2")
    with pytest.raises(DataError, match="has 2 classes, imagewoof has 10"):
        load("imagewoof", tmp_path)


@pytest.mark.parametrize(
    "line, message", [("val_0.JPEG\tn09\t0", "line 1 names class 'n09'"), ("gone.JPEG\tn01\t0", "gone.JPEG is missing")]
)
def test_wrong_annotations_are_named(tmp_path: Path, line: str, message: str) -> None:
    folder = write_tiny_imagenet(tmp_path, WORDS)
    (folder / "val" / "val_annotations.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        read_folder(tmp_path, TINY)


@pytest.mark.parametrize("content, message", [(b"", "is empty"), (b"<html>not found</html>", "begins with 3c68746d")])
def test_prepare_names_a_file_that_is_not_an_image(tmp_path: Path, content: bytes, message: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "train" / "dog" / "4.JPEG").write_bytes(content)
    with pytest.raises(DataError, match=f"4.JPEG is not an image: it {message}"):
        prepare("folder", tmp_path)


def test_prepare_counts_files_and_bytes(folder: Path) -> None:
    summary = prepare("folder", folder)
    assert summary.train.per_class == (5, 5)
    assert summary.test.per_class == (3, 3)
    assert summary.test.bytes == sum(path.stat().st_size for path in (folder / "val").glob("*/*"))


def test_prepare_says_when_images_are_missing(tmp_path: Path) -> None:
    write_folder(tmp_path / "imagewoof2", tuple(DOGS))
    assert "the official set has 9,025 and 3,929 samples" in str(prepare("imagewoof", tmp_path))


def test_stream_goes_through_every_file_once_in_floats(folder: Path) -> None:
    files = load("folder", folder).train
    batches = list(stream(files, 4, size=16, shuffle=True, workers=0).epoch(0))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == [0] * 5 + [1] * 5
    for images, _ in batches:
        assert images.shape[1:] == (3, 16, 16)
        assert images.dtype == torch.float32
        assert 0 <= images.min() < images.max() <= 1


def test_stream_without_augmentation_gives_centers(folder: Path) -> None:
    from torchvision.transforms import v2

    files = load("folder", folder).test
    image = Image.open(files.paths[0]).convert("RGB")
    expected = v2.functional.pil_to_tensor(image)
    expected = v2.functional.resize(expected, [16], antialias=True)
    top, left = ((size - 14) // 2 for size in expected.shape[1:])
    found = next(stream(files, 1, size=14, workers=0).epoch(0))[0][0]
    assert round(14 * 256 / 224) == 16
    torch.testing.assert_close(found * 255, expected[:, top : top + 14, left : left + 14].float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_ranks_and_resuming_do_not_change_a_sample(folder: Path, workers: int) -> None:
    files = load("folder", folder).train
    options = {"size": 12, "augment": True, "shuffle": True, "seed": 5}
    whole = list(stream(files, 4, workers=0, **options).epoch(3))
    parts = [list(stream(files, 4, workers=0, rank=rank, world_size=2, **options).epoch(3)) for rank in (0, 1)]
    resumed = list(stream(files, 4, workers=workers, **options).epoch(3, start_step=1))
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
    assert len(resumed) == 2
    for (a, x), (b, y) in zip(whole[1:], resumed):
        assert torch.equal(a, b)
        assert torch.equal(x, y)


def test_rank_without_a_sample_of_the_last_batch_gets_an_empty_one(folder: Path) -> None:
    files = load("folder", folder).train.subset(9)
    parts = [list(stream(files, 8, size=12, workers=0, rank=rank, world_size=2).epoch(0)) for rank in (0, 1)]
    assert [len(labels) for _, labels in parts[0]] == [4, 0]
    assert [len(labels) for _, labels in parts[1]] == [4, 1]
    assert parts[0][1][0].shape == (0, 3, 12, 12)


def test_step_outside_of_an_epoch_is_refused_at_once(folder: Path) -> None:
    with pytest.raises(ValueError, match="`start_step`"):
        stream(load("folder", folder).train, 4, size=12).epoch(0, start_step=4)


def test_crops_differ_by_epoch_and_seed(folder: Path) -> None:
    files = load("folder", folder).train
    first = [
        next(stream(files, 10, size=12, augment=True, seed=seed, workers=0).epoch(epoch))[0]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (first[a] != first[b]).flatten(1).any(1).float().mean() > 0.8


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_leaves_the_global_generator_alone(folder: Path, workers: int) -> None:
    state = torch.get_rng_state()
    list(stream(load("folder", folder).train, 5, size=12, augment=True, workers=workers).epoch(0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("keep", [0, 300])
def test_broken_image_is_named_in_one_line(tmp_path: Path, workers: int, keep: int) -> None:
    write_folder(tmp_path)
    path = tmp_path / "train" / "cat" / "3.JPEG"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"3\.JPEG is not a whole image") as caught:
        list(stream(load("folder", tmp_path).train, 5, size=12, workers=workers).epoch(0))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_decode_holds_centers_in_memory(folder: Path) -> None:
    files = load("folder", folder).train
    samples = decode(files, 16)
    assert isinstance(samples, Samples)
    assert samples.inputs.shape == (10, 3, 16, 16)
    assert samples.inputs.dtype == torch.uint8
    assert samples.labels.tolist() == list(files.targets)
    image = Image.open(files.paths[3]).convert("RGB")
    assert abs(float(samples.inputs[3].float().mean()) - float(np.asarray(image).mean())) < 20


def test_subset_of_files_is_balanced(folder: Path) -> None:
    files = load("folder", folder).train.subset(4)
    assert files.targets == (0, 0, 1, 1)


BAD_STREAMS = [({"size": 0}, "`size`"), ({"workers": -1}, "`workers`"), ({"batch_size": 0}, "`batch_size`")]


@pytest.mark.parametrize("options, name", BAD_STREAMS)
def test_impossible_stream_is_refused(folder: Path, options: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        stream(load("folder", folder).train, **{"batch_size": 2, "size": 8, **options})


def test_stream_of_samples_in_memory_is_refused() -> None:
    samples = Samples(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="use Batches"):
        stream(samples, 2)  # type: ignore[arg-type]


def test_folder_layout_has_no_fixed_classes() -> None:
    assert FOLDER.classes is None


def test_what_follows_a_random_crop_is_flip_and_cutout_of_the_same_draw(folder: Path) -> None:
    files = load("folder", folder).train

    def batch(augment: Augment | bool) -> torch.Tensor:
        return next(stream(files, 8, size=16, augment=augment, seed=3, workers=0).epoch(1))[0]

    plain, flipped = batch(Augment()), batch(Augment(flip=True))
    turned = [bool(torch.equal(b, a.flip(-1))) for a, b in zip(plain, flipped)]
    kept = [bool(torch.equal(a, b)) for a, b in zip(plain, flipped)]
    assert all(a != b for a, b in zip(turned, kept))
    assert 0 < sum(turned) < 8
    assert torch.equal(flipped, batch(True))
    cut = batch(Augment(cutout=6))
    changed = (cut != plain).any(1)
    assert all(0 < int(mask.sum()) <= 36 for mask in changed)
    assert (cut[changed[:, None].expand_as(cut)] == 0.5).all()


def test_a_padded_crop_of_a_random_crop_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="`augment` must have `flip` and `cutout` alone"):
        stream(load("folder", folder).train, 4, augment=Augment(crop="zero"))
