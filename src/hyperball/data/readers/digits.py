"""scikit-learn's digits: 1,797 images of 8 x 8 pixels with 17 gray levels, part of the package."""

import torch

from hyperball.data.errors import optional
from hyperball.data.samples import Dataset, Samples

TEST = 360  # the last fifth: the file goes by writers, so these are hands that training has not seen


def digits() -> Dataset:
    """The first 1,437 digits to train, the last 360 to test; gray level v becomes the byte round(255 v / 16)."""
    bunch = optional("sklearn.datasets").load_digits()
    inputs = torch.from_numpy((bunch.images * (255 / 16)).round()).to(torch.uint8)[:, None]
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    train, test = (Samples(inputs[part], labels[part]) for part in (slice(None, -TEST), slice(-TEST, None)))
    return Dataset("digits", "images", tuple(str(digit) for digit in range(10)), train, test)
