"""Corruptions: pixels in and out, repeatable, stronger with severity, and against formulas of numpy and scipy."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from hyperball.data.corruptions import SEVERITIES, TABLE, corrupt, names

IMAGES = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.6 + 0.2


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("severity", SEVERITIES)
def test_corrupted_images_are_pixels_of_the_same_shape(name, severity):
    extreme = torch.cat([IMAGES, torch.zeros(1, 3, 32, 32), torch.ones(1, 3, 32, 32)])
    moved = corrupt(extreme, name, severity)
    assert moved.shape == extreme.shape
    assert moved.dtype == extreme.dtype
    assert 0 <= float(moved.min()) <= float(moved.max()) <= 1
    assert not torch.equal(moved, extreme)


@pytest.mark.parametrize("name", names())
def test_severities_change_ever_more(name):
    changes = [float((corrupt(IMAGES, name, severity) - IMAGES).abs().mean()) for severity in SEVERITIES]
    assert changes == sorted(changes)
    assert changes[0] > 0
    assert changes[-1] > 2 * changes[0]


@pytest.mark.parametrize("name", names())
def test_what_is_random_depends_on_seed_and_place_alone(name):
    whole = corrupt(IMAGES, name, 3, seed=7)
    assert torch.equal(corrupt(IMAGES, name, 3, seed=7), whole)
    index = torch.tensor([4, 1])
    torch.testing.assert_close(corrupt(IMAGES[index], name, 3, seed=7, index=index), whole[index])
    other = corrupt(IMAGES, name, 3, seed=8)
    assert torch.equal(other, whole) == (name in ("blur", "contrast", "brightness"))


@pytest.mark.parametrize("name", names())
def test_bytes_are_divided_by_255(name):
    bytes_ = (255 * IMAGES).round().to(torch.uint8)
    assert torch.equal(corrupt(bytes_, name, 2), corrupt(bytes_.float() / 255, name, 2))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_blur_is_a_gaussian_filter(severity):
    sigma = TABLE["blur"].strengths[severity - 1]
    radius = max(1, int(np.ceil(3 * sigma)))
    exact = IMAGES.double().numpy()
    expected = gaussian_filter(exact, (0, 0, sigma, sigma), mode="nearest", radius=(0, 0, radius, radius))
    found = corrupt(IMAGES, "blur", severity)
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), rtol=1e-5, atol=1e-6)


def test_blur_keeps_its_width_relative_to_the_image():
    edge = torch.zeros(1, 1, 64, 64)
    edge[..., 32:] = 1
    small = corrupt(edge[:, :, ::2, ::2].contiguous(), "blur", 5)[0, 0, 0]
    large = corrupt(edge, "blur", 5)[0, 0, 0]
    torch.testing.assert_close(large[::2][:12], small[:12], rtol=0, atol=0.03)


def test_contrast_brightness_and_noise_have_their_strength():
    strength = TABLE["contrast"].strengths[1]
    mean = IMAGES.mean((2, 3), keepdim=True)
    torch.testing.assert_close(corrupt(IMAGES, "contrast", 2), mean + strength * (IMAGES - mean))
    torch.testing.assert_close(corrupt(IMAGES, "brightness", 3), (IMAGES + 0.15).clamp(max=1))
    gray = torch.full((4, 3, 64, 64), 0.5)
    difference = corrupt(gray, "noise", 1) - gray
    assert float(difference.std()) == pytest.approx(TABLE["noise"].strengths[0], rel=0.03)
    assert abs(float(difference.mean())) < 0.001


def test_impulses_hit_their_share_of_pixels_in_all_channels():
    gray = torch.full((8, 3, 64, 64), 0.5)
    moved = corrupt(gray, "impulse", 5)
    hit = moved != gray
    assert torch.equal(hit[:, 0], hit[:, 2])
    assert float(hit.float().mean()) == pytest.approx(TABLE["impulse"].strengths[4], abs=0.01)
    assert set(moved.unique().tolist()) == {0.0, 0.5, 1.0}


@pytest.mark.parametrize("severity", SEVERITIES)
def test_an_occlusion_is_one_gray_square_inside(severity):
    moved = corrupt(torch.ones(40, 1, 32, 32), "occlusion", severity)
    side = round(32 * TABLE["occlusion"].strengths[severity - 1])
    covered = moved == 0.5
    assert torch.equal(covered.sum((1, 2, 3)), torch.full((40,), side * side))
    rows, columns = covered.any(3)[:, 0], covered.any(2)[:, 0]
    assert torch.equal(rows.sum(1), torch.full((40,), side))
    assert torch.equal(columns.sum(1), torch.full((40,), side))
    assert len({tuple(row.tolist()) for row in rows}) > 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((IMAGES, "nois", 1), "unknown corruption 'nois'; did you mean 'noise'?"),
        ((IMAGES, "noise", 0), "`severity` must be one of"),
        ((IMAGES, "noise", True), "`severity` must be one of"),
        ((IMAGES, "noise", 3.0), "`severity` must be one of .*, got 3.0"),
        ((IMAGES, "noise", "3"), "`severity` must be one of .*, got '3'"),
        ((IMAGES, "noise", [3]), "`severity` must be one of"),
        ((2 * IMAGES, "noise", 1), r"`images` must be in \[0, 1\], got values from"),
        ((IMAGES[0], "noise", 1), r"`images` must be \[B, C, H, W\], got \(3, 32, 32\)"),
    ],
)
def test_mistakes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        corrupt(*arguments)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_no_images_are_no_images(name, dtype):
    found = corrupt(torch.zeros(0, 3, 8, 8, dtype=dtype), name, 3)
    assert found.shape == (0, 3, 8, 8)
    assert found.dtype == torch.float32


def test_a_severity_may_be_a_whole_number_of_numpy():
    assert torch.equal(corrupt(IMAGES, "noise", np.int64(3)), corrupt(IMAGES, "noise", 3))
