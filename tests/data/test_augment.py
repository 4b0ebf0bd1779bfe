"""Augmentation: each sample as a loop over samples would do it, with draws that follow their distribution."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from data_reference import fold_reference, image_reference, key_reference, mix_reference

from hyperball.data import Augment, Normalization
from hyperball.data.hashing import WORD, fold, key_of, mix, normal, permutation, uniform


def random_images(n: int, channels: int = 3, height: int = 12, width: int = 10) -> torch.Tensor:
    return torch.randint(256, (n, channels, height, width), dtype=torch.uint8)


AUGMENTS = [
    Augment(),
    Augment("mirror"),
    Augment("zero", pad=3),
    Augment("mirror", pad=10),
    Augment("zero", pad=0),
    Augment(flip=True),
    Augment(cutout=5),
    Augment(cutout=4, fill=0.25),
    Augment(cutout=40),
    Augment("mirror", flip=True, cutout=3),
    Augment("zero", pad=5, flip=True, cutout=6, fill=0.0),
    Augment("zero", pad=10, flip=True),
    Augment(window=7),
    Augment(window=10, flip=True, cutout=3),
]


@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_batch_equals_a_loop_over_its_samples(augment: Augment, channels: int) -> None:
    images = random_images(32, channels)
    keys = augment.draw(32, torch.Generator().manual_seed(1))
    found = augment(images, keys)
    expected = [image_reference(image.numpy(), int(key), augment) for image, key in zip(images, keys)]
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.from_numpy(np.stack(expected)))


def test_words_equal_their_definition_in_integers() -> None:
    words = torch.tensor([0, 1, 2, 0xFFFFFFFF, 0x80000000, 12345])
    values = [0, 7, 0xFFFFFFFF]
    assert mix(words).tolist() == [mix_reference(word) for word in words.tolist()]
    for value in values:
        assert fold(words, value).tolist() == [fold_reference(word, value) for word in words.tolist()]


def test_mix_is_one_to_one_and_stays_a_word() -> None:
    words = mix(torch.arange(1 << 18))
    assert len(words.unique()) == 1 << 18
    assert words.min() >= 0
    assert words.max() <= WORD


def test_every_bit_of_a_key_moves_half_of_the_bits() -> None:
    keys = torch.arange(2000) * 7919
    for bit in range(32):
        changed = fold(keys, 3) ^ fold(keys ^ (1 << bit), 3)
        flipped = sum(int((changed >> i & 1).sum()) for i in range(32)) / (32 * len(keys))
        assert abs(flipped - 0.5) < 0.02


def test_uniform_numbers_are_uniform_and_independent_between_neighbors() -> None:
    key = key_of(0, 1)
    first = uniform(fold(key, torch.arange(100_000)), 0)
    second = uniform(fold(key, torch.arange(100_000)), 1)
    counts = torch.histc(first, 50, 0, 1)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_squared < 94  # 99.99 % of 49 degrees of freedom
    assert first.min() >= 0
    assert first.max() < 1
    for a, b in ((first, second), (first[1:], first[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / math.sqrt(100_000)


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    x = normal(key_of(5), torch.arange(200_000)).double()
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1) < 0.02
    assert abs((x**4).mean() - 3) < 0.1
    assert x.isfinite().all()


def test_permutations_are_permutations_that_differ_by_key() -> None:
    orders = [permutation(1000, key_of(seed)) for seed in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1000))
    assert not torch.equal(orders[0], orders[1])
    places = torch.stack([permutation(10, key_of(seed)) for seed in range(2000)])
    counts = torch.stack([(places == i).sum(0) for i in range(10)])
    assert ((counts - 200) ** 2 / 200).sum() < 140  # 99.9 % of 81 degrees of freedom


@pytest.mark.parametrize("values", [(0,), (1,), (1 << 32,), (0, 0), (2**63 - 1,), (5, 6), (6, 5)])
def test_keys_of_different_integers_differ(values: tuple[int, ...]) -> None:
    others = [(0,), (1,), (1 << 32,), (0, 0), (2**63 - 1,), (5, 6), (6, 5)]
    others.remove(values)
    assert int(key_of(*values)) not in [int(key_of(*other)) for other in others]


@pytest.mark.parametrize("values", [(0,), (1 << 32, 3), (2**63 - 1, 5, 1)])
def test_keys_equal_their_definition_in_integers(values: tuple[int, ...]) -> None:
    assert int(key_of(*values)) == key_reference(*values)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_images_are_float32_whatever_the_default(default: torch.dtype) -> None:
    images, keys = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), torch.arange(1)
    expected = Augment("mirror", flip=True)(images, keys)
    torch.set_default_dtype(default)
    try:
        found = Augment("mirror", flip=True)(images, keys)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_crops_and_flips_of_a_batch_are_drawn_for_every_sample() -> None:
    position = torch.arange(32 * 32).view(1, 1, 32, 32)
    codes = torch.cat([position // 32, position % 32], 1).to(torch.uint8).expand(8000, -1, -1, -1)
    augment = Augment("zero", pad=4, flip=True)
    out = (255 * augment(codes, augment.draw(8000, torch.Generator().manual_seed(0)))).round().long()
    rows, columns = out[:, 0, 16, 16] - 16, out[:, 1, 16, 16]
    flipped = out[:, 1, 16, 15] > out[:, 1, 16, 16]
    columns = torch.where(flipped, columns - 15, columns - 16)
    assert abs(flipped.float().mean() - 0.5) < 0.025
    for offsets in (rows, columns):
        counts = torch.bincount(offsets + 4, minlength=9)
        assert len(counts) == 9
        assert ((counts - 8000 / 9) ** 2 / (8000 / 9)).sum() < 28  # 99.95 % of 8 degrees of freedom
    both = torch.stack([rows.float(), columns.float(), flipped.float()])
    assert (torch.corrcoef(both) - torch.eye(3)).abs().max() < 0.05


def test_cutout_centers_are_uniform_over_the_image() -> None:
    augment = Augment(cutout=1, fill=1.0)
    out = augment(torch.zeros(6400, 1, 8, 8, dtype=torch.uint8), augment.draw(6400, torch.Generator().manual_seed(0)))
    counts = out.sum(0)[0]
    assert (out.sum((1, 2, 3)) == 1).all()
    assert ((counts - 100) ** 2 / 100).sum() < 112  # 99.99 % of 63 degrees of freedom


def test_sample_does_not_depend_on_its_neighbors() -> None:
    augment = Augment("mirror", flip=True, cutout=4)
    images, keys = random_images(16), torch.arange(16)
    whole = augment(images, keys)
    assert torch.equal(augment(images[5:9], keys[5:9]), whole[5:9])


@pytest.mark.parametrize(
    "augment, batch",
    [
        (Augment("mirror", flip=True, cutout=2), torch.empty(0, 3, 8, 8, dtype=torch.uint8)),
        (Augment(rotate=True, jitter=0.1, points=4), torch.empty(0, 8, 3)),
    ],
)
def test_empty_batch_stays_empty(augment: Augment, batch: torch.Tensor) -> None:
    assert augment(batch, torch.empty(0, dtype=torch.int64)).shape[0] == 0


def test_generator_stands_for_the_words_it_draws() -> None:
    augment, images = Augment("mirror", flip=True), random_images(8)
    keys = augment.draw(8, torch.Generator().manual_seed(3))
    assert torch.equal(augment(images, torch.Generator().manual_seed(3)), augment(images, keys))


def test_input_is_not_changed() -> None:
    images = random_images(8)
    before = images.clone()
    Augment("zero", flip=True, cutout=9)(images, torch.arange(8))
    assert torch.equal(images, before)


def test_float_images_stay_as_they_are_scaled() -> None:
    images = torch.rand(4, 3, 8, 8)
    assert torch.equal(Augment()(images, torch.arange(4)), images)
    flipped = Augment(flip=True)(images, torch.arange(4))
    assert all(torch.equal(out, image) or torch.equal(out, image.flip(2)) for out, image in zip(flipped, images))


def test_rotation_turns_about_the_up_axis_by_uniform_angles() -> None:
    clouds = torch.tensor([[[1.0, 0.5, 0.0], [0.0, -0.5, 1.0]]]).repeat(5000, 1, 1)
    out = Augment(rotate=True)(clouds, torch.arange(5000))
    assert torch.equal(out[..., 1], clouds[..., 1])
    torch.testing.assert_close(out.norm(dim=2), clouds.norm(dim=2))
    torch.testing.assert_close((out[:, 0] * out[:, 1]).sum(1), torch.full((5000,), -0.25), atol=1e-6, rtol=0)
    angles = torch.atan2(out[:, 0, 2], out[:, 0, 0])
    counts = torch.histc(angles, 20, -math.pi, math.pi)
    assert ((counts - 250) ** 2 / 250).sum() < 50  # 99.98 % of 19 degrees of freedom


def test_jitter_is_normal_clipped_and_different_at_every_coordinate() -> None:
    noise = Augment(jitter=0.01)(torch.zeros(200, 64, 3), torch.arange(200)) / 0.01
    assert abs(noise.std() - 1) < 0.02
    assert noise.abs().max() <= 5
    assert len(noise.unique()) > 0.99 * noise.numel()


def test_point_subset_takes_points_without_repeats_and_in_another_way_for_every_cloud() -> None:
    clouds = torch.arange(30.0).view(1, 10, 3).repeat(500, 1, 1)
    out = Augment(points=4)(clouds, torch.arange(500))
    assert out.shape == (500, 4, 3)
    chosen = (out[..., 0] / 3).long()
    assert torch.equal(out, chosen[..., None] * 3 + torch.arange(3.0))
    assert all(len(row.unique()) == 4 for row in chosen)
    counts = torch.bincount(chosen.flatten(), minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 30


BAD_AUGMENTS: list[tuple[dict[str, object], str]] = [
    ({"crop": "reflect"}, "`crop`"),
    ({"pad": -1}, "`pad`"),
    ({"pad": 1.5}, "`pad`"),
    ({"cutout": -2}, "`cutout`"),
    ({"cutout": True}, "`cutout`"),
    ({"points": -1}, "`points`"),
    ({"jitter": -0.1}, "`jitter`"),
    ({"jitter": math.nan}, "`jitter`"),
    ({"jitter": math.inf}, "`jitter`"),
    ({"fill": 127.5}, "`fill`"),
]


@pytest.mark.parametrize("options, name", BAD_AUGMENTS)
def test_impossible_augmentation_is_refused(options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Augment(**options)  # type: ignore[arg-type]


BAD_CALLS: list[tuple[Augment, Callable[[], torch.Tensor], str]] = [
    (Augment(rotate=True), lambda: random_images(2), "are for clouds"),
    (Augment(flip=True), lambda: torch.zeros(2, 5, 3), "are for images"),
    (Augment("mirror", pad=11), lambda: random_images(2), "`pad` must be at most"),
    (Augment(points=6), lambda: torch.zeros(2, 5, 3), "`points` must be at most the 5"),
    (Augment(), lambda: torch.zeros(2, 5), "must be images"),
]


@pytest.mark.parametrize("augment, batch, message", BAD_CALLS)
def test_augmentation_of_the_wrong_batch_is_refused(
    augment: Augment, batch: Callable[[], torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        augment(batch(), torch.arange(2))


def test_default_normalization_is_that_of_the_papers() -> None:
    pixels = torch.arange(256.0).view(1, 1, 16, 16)
    torch.testing.assert_close(Normalization()(pixels / 255), (pixels - 127.5) / 128)


def test_normalization_acts_by_channel() -> None:
    images = torch.rand(2, 3, 4, 4)
    out = Normalization((0.1, 0.2, 0.3), (1.0, 2.0, 4.0))(images)
    torch.testing.assert_close(out[:, 2], (images[:, 2] - 0.3) / 4)


def test_wrong_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry a channel"):
        Normalization((0.5,), (1.0, 1.0))
    with pytest.raises(ValueError, match="`std` must be > 0"):
        Normalization((0.5,), (0.0,))
    with pytest.raises(ValueError, match="3 channels"):
        Normalization((0.1, 0.2, 0.3), (1.0, 2.0, 4.0))(torch.rand(2, 1, 4, 4))


@pytest.mark.gpu
def test_augmentation_on_a_gpu_equals_that_on_the_cpu_and_needs_no_synchronization() -> None:
    augment, images, keys = Augment("mirror", flip=True, cutout=5), random_images(64), torch.arange(64)
    on_gpu, keys_there = images.cuda(), keys.cuda()
    augment(on_gpu, keys_there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = augment(on_gpu, keys_there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), augment(images, keys), rtol=0, atol=1e-7)
