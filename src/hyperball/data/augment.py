"""Augmentation of a batch, each sample with its own draws, on the device that holds it, with static shapes."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hyperball.data.hashing import WORD, fold, normal, uniform
from hyperball.data.parts import boxes, resized_parts

CROP_Y, CROP_X, FLIP, CUT_Y, CUT_X, ANGLE, NOISE, CHOICE = range(8)
IMAGE_CHANNELS = CUT_X + 1  # what images draw, hashed at once
JITTER_LIMIT = 5.0  # PointNet clips the noise of 0.01 at 0.05


@dataclass(frozen=True)
class Augment:
    """What is done to each sample; a pure function of the batch and one random word a sample.

    Args:
        crop: a random crop of the original size out of the padded image: "mirror" reflects (the border
            pixel twice, as the papers' code does), "zero" pads with black.
        pad: pixels of padding on each side for `crop`.
        window: side of a random square part that becomes the sample (0: all of it).
        resized: side to which a random part is resized, of 8 to 100 % of the area, sides 3:4 to 4:3 (0: no part).
        flip: left-right with probability 1/2.
        cutout: side of a square, centered on a random pixel and cut off at the border, that becomes `fill`.
        rotate: a cloud by a random angle about the up (y) axis.
        jitter: standard deviation of Gaussian noise on every coordinate of a cloud, clipped at five of them.
        points: a random subset of that many points of a cloud (0: all).
        fill: what `cutout` writes, in units of pixels in [0, 1].
    """

    crop: Literal["mirror", "zero"] | None = None
    pad: int = 4
    flip: bool = False
    cutout: int = 0
    rotate: bool = False
    jitter: float = 0.0
    points: int = 0
    fill: float = 0.5
    window: int = 0
    resized: int = 0

    def __post_init__(self) -> None:
        if self.crop not in (None, "mirror", "zero"):
            raise ValueError(f'`crop` must be None, "mirror" or "zero", got {self.crop!r}')
        if self.crop and self.window:
            raise ValueError(f"`crop` keeps the size and `window` does not: got {self.crop!r} and {self.window}")
        if self.resized and (self.crop or self.window):
            raise ValueError(f"`resized` goes with neither `crop` nor `window`: got {self.crop!r} and {self.window}")
        for name in ("pad", "cutout", "points", "window", "resized"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"`{name}` must be an integer >= 0, got {value!r}")
        if not (self.jitter >= 0 and math.isfinite(self.jitter)):
            raise ValueError(f"`jitter` must be finite and >= 0, got {self.jitter}")
        if not 0 <= self.fill <= 1:
            raise ValueError(f"`fill` must be in [0, 1], the range of pixels, got {self.fill}")

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n random words, on the generator's device: what `augment(batch, keys)` takes for n samples."""
        return torch.randint(WORD + 1, (n,), generator=generator, device=generator.device)

    def __call__(self, batch: Tensor, keys: Tensor | torch.Generator) -> Tensor:
        """Images uint8 [B, C, H, W] become float [0, 1]; clouds float [B, P, 3] stay float."""
        if not isinstance(keys, Tensor):  # torch.compile cannot ask whether a tensor is a Generator
            keys = self.draw(len(batch), keys).to(batch.device)
        if batch.dim() == 4:
            return self._images(batch, keys)
        if batch.dim() == 3 and batch.shape[2] == 3:
            return self._clouds(batch, keys)
        raise ValueError(f"`batch` must be images [B, C, H, W] or clouds [B, P, 3], got {tuple(batch.shape)}")

    def _images(self, batch: Tensor, keys: Tensor) -> Tensor:
        if self.rotate or self.jitter or self.points:
            raise ValueError("`rotate`, `jitter` and `points` are for clouds, but the batch holds images")
        if not (self.crop or self.flip or self.cutout or self.window or self.resized):
            return to_float(batch)
        if self.resized:
            batch = resized_parts(to_float(batch), boxes(keys, *batch.shape[2:]), self.resized)
        words = fold(keys, torch.arange(IMAGE_CHANNELS, device=keys.device)[:, None])
        if self.window:
            batch = part(batch, words, self.window)
        if self.crop:
            batch = moved(batch, words, self.crop, self.pad, self.flip)
        elif self.flip:
            batch = torch.where(flipped(words)[:, None, None, None], batch.flip(3), batch)
        images = to_float(batch)
        if self.cutout:
            images = torch.where(cut(words, self.cutout, batch.shape[2], batch.shape[3]), self.fill, images)
        return images

    def _clouds(self, batch: Tensor, keys: Tensor) -> Tensor:
        if self.crop or self.flip or self.cutout or self.window or self.resized:
            raise ValueError(
                "`crop`, `flip`, `cutout`, `window` and `resized` are for images, but the batch holds clouds"
            )
        if self.points:
            batch = chosen_points(batch, keys, self.points)
        if self.rotate:
            batch = turned(batch, 2 * math.pi * uniform(keys, ANGLE))
        if self.jitter:
            channel = torch.arange(3 * batch.shape[1], device=batch.device).view(-1, 3)
            noise = normal(fold(keys, NOISE)[:, None, None], channel).clamp(-JITTER_LIMIT, JITTER_LIMIT)
            batch = batch + self.jitter * noise
        return batch


def to_float(batch: Tensor) -> Tensor:
    """x / 255 for bytes, in float32; anything else as it is."""
    if batch.dtype != torch.uint8:
        return batch
    is_default = torch.get_default_dtype() == torch.float32  # what a quotient of integers is: one kernel, no copy
    return (batch if is_default else batch.float()) / 255


def integers(word: Tensor, n: int) -> Tensor:
    """floor(n word / 2³²): uniform in 0..n-1."""
    return (word * n) >> 32


def part(batch: Tensor, words: Tensor, side: int) -> Tensor:
    """out[b, c, i, j] = batch[b, c, y_b + i, x_b + j] for i, j < side, with uniform y_b and x_b."""
    height, width = batch.shape[2:]
    if side > min(height, width):
        raise ValueError(f"`window` must be at most the image's size, {height}x{width}, got {side}")
    steps = torch.arange(side, device=batch.device)
    rows = steps + integers(words[CROP_Y], height - side + 1)[:, None]
    columns = steps + integers(words[CROP_X], width - side + 1)[:, None]
    source = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)[:, None]
    out = batch.flatten(2).gather(2, source.expand(-1, batch.shape[1], -1))
    return out.view(len(batch), batch.shape[1], side, side)


def flipped(words: Tensor) -> Tensor:
    """Which samples are turned left to right, with probability 1/2: those whose word is odd."""
    return (words[FLIP] & 1).bool()


def moved(batch: Tensor, words: Tensor, crop: str, pad: int, flip: bool) -> Tensor:
    """out[b, c, i, j] = padded[b, c, y_b + i, x_b + j], with j counted from the right where sample b is flipped."""
    height, width = batch.shape[2:]
    if pad > min(height, width):
        raise ValueError(f"`pad` must be at most the image's size, {height}x{width}, got {pad}")
    shift = (integers(words[CROP_Y : CROP_X + 1], 2 * pad + 1) - pad)[:, :, None]
    columns = torch.arange(width, device=batch.device)
    rows = shift[0] + (columns if height == width else torch.arange(height, device=batch.device))
    if flip:
        columns = torch.where(flipped(words)[:, None], columns.flip(0), columns)
    columns = columns + shift[1]
    held = mirrored if crop == "mirror" else clipped
    row, column = held(rows, height), held(columns, width)
    source = (row[:, :, None] * width + column[:, None, :]).flatten(1)[:, None]
    out = batch.flatten(2).gather(2, source.expand(-1, batch.shape[1], -1)).view(batch.shape)
    if crop == "zero":
        out = out * ((rows == row)[:, None, :, None] & (columns == column)[:, None, None, :])
    return out


def mirrored(index: Tensor, n: int) -> Tensor:
    """-1 - i below 0 and 2n - 1 - i from n on: a reflection that repeats the outermost pixel (SYMMETRIC padding)."""
    index = torch.maximum(index, ~index)
    return torch.minimum(index, 2 * n - 1 - index)


def clipped(index: Tensor, n: int) -> Tensor:
    return index.clamp(0, n - 1)


def within(index: Tensor, n: int) -> Tensor:
    return (index >= 0) & (index < n)


def cut(words: Tensor, side: int, height: int, width: int) -> Tensor:
    """A mask [B, 1, H, W]: side x side pixels about a uniform center, less where the border cuts them off."""
    first_row = integers(words[CUT_Y], height) - side // 2
    first_column = integers(words[CUT_X], width) - side // 2
    rows = within(torch.arange(height, device=words.device) - first_row[:, None], side)
    columns = within(torch.arange(width, device=words.device) - first_column[:, None], side)
    return rows[:, None, :, None] & columns[:, None, None, :]


def turned(clouds: Tensor, angle: Tensor) -> Tensor:
    """(x cos a + z sin a, y, -x sin a + z cos a): a turn about the up axis."""
    cosine, sine = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    x, y, z = clouds.unbind(-1)
    return torch.stack([x * cosine + z * sine, y, z * cosine - x * sine], dim=-1)


def chosen_points(clouds: Tensor, keys: Tensor, n: int) -> Tensor:
    """n points of every cloud, those with the smallest hashes, in the order of the hashes."""
    size = clouds.shape[1]
    if n > size:
        raise ValueError(f"`points` must be at most the {size} points of a cloud, got {n}")
    hashes = fold(fold(keys, CHOICE)[:, None], torch.arange(size, device=clouds.device))
    index = hashes.argsort(dim=1, stable=True)[:, :n, None]
    return clouds.gather(1, index.expand(-1, -1, 3))
