"""Data sets: readers of the official formats, batches that live on a device, augmentation, outliers."""

from hyperball.data.augment import Augment
from hyperball.data.batches import Batches, Draw
from hyperball.data.catalog import about, load, names, prepare
from hyperball.data.errors import DataError, MissingFiles
from hyperball.data.points import outliers
from hyperball.data.readers.clouds import clouds
from hyperball.data.samples import Dataset, Files, Normalization, Samples
from hyperball.data.stream import Stream, decode, shorter_side, stream
from hyperball.data.summary import Summary

__all__ = [
    "Augment",
    "Batches",
    "DataError",
    "Dataset",
    "Draw",
    "Files",
    "MissingFiles",
    "Normalization",
    "Samples",
    "Stream",
    "Summary",
    "about",
    "clouds",
    "decode",
    "load",
    "names",
    "outliers",
    "prepare",
    "shorter_side",
    "stream",
]
