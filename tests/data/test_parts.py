"""Random parts of images, resized: where they lie, how they are resized, and what a recipe makes of them."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_cases import write_images

from hyperball.data import Augment, Dataset, Samples
from hyperball.data.parts import boxes, largest_center, resized_parts
from hyperball.training import Recipe, RecipeError
from hyperball.training.recipe.sections import DataConfig
from hyperball.training.sets import Source, load_set, train_feed

KEYS = torch.arange(4000)


def random_images(n: int, height: int, width: int) -> Tensor:
    return torch.randint(256, (n, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(32, 32), (20, 48), (1, 1), (7, 90)], ids=str)
def test_parts_lie_in_the_image_and_have_sides_of_a_moderate_ratio(size):
    height, width = size
    top, left, rows, columns = boxes(KEYS, height, width)
    assert all((edge >= 0).all() for edge in (top, left))
    assert all((side >= 1).all() for side in (rows, columns))
    assert (top + rows <= height).all()
    assert (left + columns <= width).all()
    # Sides are whole pixels: the ratio of sides half a pixel longer or shorter is within 3:4 and 4:3.
    assert ((columns - 0.5) / (rows + 0.5) <= 4 / 3).all()
    assert ((columns + 0.5) / (rows - 0.5) >= 3 / 4).all()


def test_parts_are_distributed_as_those_of_torchvision():
    transforms = pytest.importorskip("torchvision.transforms.v2")
    torch.manual_seed(0)
    crop, image = transforms.RandomResizedCrop(8), torch.zeros(3, 40, 60)
    drawn = [crop.make_params([image]) for _ in range(4000)]
    theirs = torch.tensor([[one[name] for one in drawn] for name in ("top", "left", "height", "width")]).double()
    ours = boxes(KEYS, 40, 60).double()
    for measure in (
        lambda part: part[2] * part[3],
        lambda part: torch.log(part[3] / part[2]),
        lambda part: part[0] / (40 - part[2] + 1),
        lambda part: part[1] / (60 - part[3] + 1),
    ):
        mine, others = measure(ours), measure(theirs)
        error = math.sqrt((mine.var() + others.var()) / len(KEYS))
        assert abs(mine.mean() - others.mean()) < 4 * error
        assert float(mine.std()) == pytest.approx(float(others.std()), rel=0.06)
    assert len(set(map(tuple, ours.T.tolist()))) > 3000


@pytest.mark.parametrize("size, center", [((30, 10), (13, 10)), ((10, 30), (10, 13)), ((12, 12), (12, 12))], ids=str)
def test_a_long_image_has_a_center(size, center):
    assert largest_center(*size) == center


@pytest.mark.parametrize("side", [32, 17, 50, 1])
def test_a_part_is_resized_as_torch_interpolates_it(side):
    images = random_images(40, 32, 24).float() / 255
    parts = boxes(torch.arange(40), 32, 24)
    found = resized_parts(images, parts, side)
    assert found.shape == (40, 3, side, side)
    for image, made, (top, left, rows, columns) in zip(images, found, parts.T.tolist(), strict=True):
        cut = image[None, :, top : top + rows, left : left + columns]
        expected = F.interpolate(cut, (side, side), mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


def test_the_whole_image_at_its_own_size_is_itself():
    images = random_images(3, 9, 9).float()
    whole = torch.tensor([[0], [0], [9], [9]]).expand(4, 3)
    assert torch.equal(resized_parts(images, whole, 9), images)


def test_a_batch_is_a_function_of_its_words_and_goes_with_flips_and_cutout():
    images, keys = random_images(64, 16, 16), torch.arange(64)
    plain, flipped = Augment(resized=16)(images, keys), Augment(resized=16, flip=True)(images, keys)
    assert torch.equal(plain, Augment(resized=16)(images, keys))
    assert not torch.equal(plain, Augment(resized=16)(images, keys + 64))
    turned = [torch.equal(a.flip(2), b) for a, b in zip(plain, flipped, strict=True)]
    assert all(t or torch.equal(a, b) for t, a, b in zip(turned, plain, flipped, strict=True))
    assert 16 < sum(turned) < 48
    assert (Augment(resized=16, cutout=8)(images, keys) == 0.5).flatten(1).sum(1).min() >= 3 * 16
    assert plain.dtype == torch.float32
    assert float(plain.min()) >= 0
    assert float(plain.max()) <= 1
    torch.testing.assert_close(plain[5:9], Augment(resized=16)(images[5:9], keys[5:9]))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"resized": -1}, "`resized` must be an integer >= 0"),
        ({"resized": 4, "crop": "zero"}, "`resized` goes with neither `crop` nor `window`"),
        ({"resized": 4, "window": 4}, "`resized` goes with neither `crop` nor `window`"),
    ],
)
def test_parts_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Augment(**options)


def test_parts_of_clouds_are_refused():
    with pytest.raises(ValueError, match="`resized` are for images"):
        Augment(resized=2)(torch.zeros(1, 6, 3), torch.zeros(1, dtype=torch.int64))


def dataset(height: int, width: int) -> Dataset:
    samples = Samples(random_images(24, height, width), torch.arange(24) % 2)
    return Dataset("squares", "images", ("a", "b"), samples, samples)


def feed_of(config: DataConfig, held: Dataset):
    feed = train_feed(Recipe(data=config, batch_size=8), held, torch.device("cpu"), 0, 1)
    feed.set(0, 0)
    return feed.take()[0]


def test_a_recipe_takes_parts_of_images_in_memory_at_their_own_size():
    config, held = DataConfig(crop="part"), dataset(16, 16)
    found = feed_of(config, load_set(config, Source(dataset=held)))
    assert found.shape == (8, 3, 16, 16)
    assert not torch.equal(found, feed_of(DataConfig(), held))


def test_images_that_are_not_square_have_no_parts():
    config = DataConfig(crop="part")
    with pytest.raises(RecipeError, match=r'`data\.crop` "part" is for square images, got squares with 16×20 pixels'):
        load_set(config, Source(dataset=dataset(16, 20)))


def test_a_recipe_holds_image_files_in_memory_for_parts_of_them(tmp_path: Path):
    config = DataConfig(name="folder", image_size=14, workers=1, crop="part")
    held = load_set(config, Source(write_images(tmp_path)))
    found = feed_of(config, held)
    assert found.shape == (8, 3, 14, 14)
    window = feed_of(DataConfig(name="folder", image_size=14, workers=1, crop="window"), held)
    assert not torch.equal(found, window)


def test_parts_compile_without_a_break():
    torch._dynamo.reset()
    images, keys = random_images(8, 12, 12), torch.arange(8)
    compiled = torch.compile(Augment(resized=12, flip=True), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images, keys), Augment(resized=12, flip=True)(images, keys))
