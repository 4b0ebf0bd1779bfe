"""Windows of images, files decoded larger than a crop of them, and workers that stay from epoch to epoch."""

from pathlib import Path

import pytest
import torch
from data_files import write_folder

from hyperball.data import Augment, decode, load, shorter_side, stream


def test_a_window_is_a_random_part_of_the_image() -> None:
    images = torch.arange(3 * 6 * 7).view(1, 3, 6, 7).expand(200, -1, -1, -1).to(torch.uint8)
    found = Augment(window=5)(images, torch.arange(200)) * 255
    assert found.shape == (200, 3, 5, 5)
    corners = {(int(value) // 7, int(value) % 7) for value in found[:, 0, 0, 0].round()}
    assert corners == {(y, x) for y in range(2) for x in range(3)}
    for y, x in corners:
        wanted = images[0, :, y : y + 5, x : x + 5].float()
        assert any(torch.equal(one.round(), wanted) for one in found)


def test_a_window_goes_with_flips_and_cutout() -> None:
    images = torch.randint(256, (50, 3, 6, 6), dtype=torch.uint8)
    keys = torch.arange(50)
    plain, flipped = Augment(window=4)(images, keys), Augment(window=4, flip=True)(images, keys)
    turned = [torch.equal(one.flip(2), other) for one, other in zip(plain, flipped, strict=True)]
    assert any(turned)
    assert all(now or torch.equal(one, other) for now, one, other in zip(turned, plain, flipped, strict=True))
    assert (Augment(window=4, cutout=2)(images, keys) == 0.5).any()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"window": -1}, "`window` must be an integer >= 0"),
        ({"window": 4, "crop": "zero"}, "`crop` keeps the size and `window` does not"),
    ],
)
def test_windows_that_make_no_sense_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Augment(**options)


def test_windows_of_small_images_and_of_clouds_are_refused() -> None:
    with pytest.raises(ValueError, match="`window` must be at most the image's size, 6x6, got 7"):
        Augment(window=7)(torch.zeros(1, 3, 6, 6, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="`window` and `resized` are for images"):
        Augment(window=2)(torch.zeros(1, 6, 3), torch.zeros(1, dtype=torch.int64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"))


def test_files_are_decoded_with_a_shorter_side_of_their_own(folder: Path) -> None:
    files = load("folder", folder).test
    streamed = torch.cat([images for images, _ in stream(files, 4, size=14, workers=0).epoch(0)])
    held = decode(files, 14, shorter=shorter_side(14), workers=1)
    assert shorter_side(14) == 16
    assert torch.equal(held.inputs.float() / 255, streamed)
    with pytest.raises(ValueError, match="`shorter` must be at least `size`, 14, got 13"):
        decode(files, 14, shorter=13)


def workers_of(held: object) -> list[int]:
    loader = held._idle[0]  # type: ignore[attr-defined]
    return [process.pid for process in loader._iterator._workers]


def test_workers_stay_from_epoch_to_epoch_and_give_what_none_would(folder: Path) -> None:
    files = load("folder", folder).train
    options = {"size": 12, "augment": True, "shuffle": True}
    held, fresh = (stream(files, 4, workers=count, **options) for count in (1, 0))
    pids = []
    for epoch, start in ((0, 0), (1, 0), (2, 1)):
        found, expected = (list(one.epoch(epoch, start)) for one in (held, fresh))
        assert len(found) == len(expected) == 3 - start
        assert all(torch.equal(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))
        pids.append(workers_of(held))
    assert pids[0] == pids[1] == pids[2]


def test_an_epoch_that_is_left_or_read_beside_another_changes_no_batch(folder: Path) -> None:
    files = load("folder", folder).train
    held = stream(files, 4, workers=1, size=12, augment=True, shuffle=True)
    expected = [list(stream(files, 4, workers=0, size=12, augment=True, shuffle=True).epoch(n)) for n in (0, 1)]
    next(held.epoch(3))
    pairs = list(zip(held.epoch(0), held.epoch(1), strict=True))
    for found, wanted in zip(zip(*pairs, strict=True), expected, strict=True):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, wanted, strict=True))
