"""Random parts of images, resized: torchvision's RandomResizedCrop for a batch, each sample with its own draws."""

import math

import torch
from torch import Tensor

from hyperball.data.hashing import fold, uniform

LEAST_AREA = 0.08
MOST_RATIO = 4 / 3  # of the sides of a part, either way
TRIES = 10  # for a part that the image holds; else its center
AREA, RATIO, ROW, COLUMN = range(8, 12)  # what a part draws, beside the draws of `augment`


def boxes(keys: Tensor, height: int, width: int) -> Tensor:
    """(top, left, rows, columns) [4, B] of a part for every random word: pixels of an image of height × width.

    Its area is uniform in 8 to 100 % of the image's and the logarithm of columns/rows in ±log 4/3; the first of ten
    draws counts that fits into the image, the place of which is uniform. Where none does, it is the largest center
    whose sides have such a ratio.
    """
    tries = fold(keys, torch.arange(TRIES, device=keys.device)[:, None])  # [TRIES, B]
    area = height * width * (LEAST_AREA + (1 - LEAST_AREA) * uniform(tries, AREA))
    ratio = torch.exp(math.log(MOST_RATIO) * (2 * uniform(tries, RATIO) - 1))
    rows, columns = torch.sqrt(area / ratio).round().long(), torch.sqrt(area * ratio).round().long()
    fits = (rows >= 1) & (rows <= height) & (columns >= 1) & (columns <= width)
    first = fits.int().argmax(0, keepdim=True)
    found = fits.any(0)
    largest = largest_center(height, width)
    rows = torch.where(found, rows.gather(0, first)[0], largest[0])
    columns = torch.where(found, columns.gather(0, first)[0], largest[1])
    top = torch.where(found, (uniform(keys, ROW) * (height - rows + 1)).long(), (height - rows) // 2)
    left = torch.where(found, (uniform(keys, COLUMN) * (width - columns + 1)).long(), (width - columns) // 2)
    return torch.stack([top.minimum(height - rows), left.minimum(width - columns), rows, columns])


def largest_center(height: int, width: int) -> tuple[int, int]:
    """The rows and columns of the largest part whose sides have a ratio of at most 4/3."""
    return min(height, round(width * MOST_RATIO)), min(width, round(height * MOST_RATIO))


def resized_parts(images: Tensor, parts: Tensor, side: int) -> Tensor:
    """Parts of float images [B, C, H, W] as [B, C, side, side], bilinear, with corners of pixels aligned."""
    top, left, rows, columns = parts
    return along(along(images, top, rows, side, 2), left, columns, side, 3)


def along(images: Tensor, first: Tensor, length: Tensor, side: int, dim: int) -> Tensor:
    """One dimension resized: out_i is between the two pixels about (i + 1/2)·length/side − 1/2 of the part."""
    centers = torch.arange(side, device=images.device) + 0.5
    place = (centers * (length[:, None] / side) - 0.5).clamp(min=0.0)  # [B, side]
    below = place.long().minimum(length[:, None] - 1)
    above = (below + 1).minimum(length[:, None] - 1)
    share = shaped((place - below).to(images.dtype), images, dim, expand=False)
    low, high = (images.gather(dim, shaped(at + first[:, None], images, dim)) for at in (below, above))
    return low + (high - low) * share


def shaped(values: Tensor, images: Tensor, dim: int, expand: bool = True) -> Tensor:
    """Values [B, side] along one dimension of images, the same at all places of the others."""
    shape = [len(images), 1, 1, 1]
    shape[dim] = values.shape[1]
    held = values.view(shape)
    if not expand:
        return held
    whole = list(images.shape)
    whole[dim] = values.shape[1]
    return held.expand(whole)
