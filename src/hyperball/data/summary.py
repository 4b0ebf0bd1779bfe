"""What `prepare` finds in a data set: counts, shapes, bytes, and what a reader should know about the files."""

from collections import Counter
from dataclasses import dataclass

from hyperball.data.errors import DataError
from hyperball.data.samples import Dataset, Files, Samples
from hyperball.data.stream import read_image

SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"RIFF", b"P6", b"P5", b"II*\x00", b"MM\x00*")
SHOWN_CLASSES = 12


@dataclass(frozen=True)
class SplitSummary:
    """One split: samples, samples a class in the order of the classes, the shape of a sample, bytes."""

    samples: int
    per_class: tuple[int, ...]
    shape: str
    bytes: int


@dataclass(frozen=True)
class Summary:
    """A verified data set in numbers; `print` it."""

    name: str
    kind: str
    classes: tuple[str, ...]
    train: SplitSummary
    test: SplitSummary
    checked: str = "sizes and labels"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.classes)} classes of {self.kind}; checked: {self.checked}"]
        for title, split in (("train", self.train), ("test", self.test)):
            low, high = min(split.per_class), max(split.per_class)
            share = f"{low:,} a class" if low == high else f"{low:,} to {high:,} a class"
            lines.append(f"  {title:5}  {split.samples:>9,}  {split.shape}, {share}, {megabytes(split.bytes)}")
        if len(self.classes) <= SHOWN_CLASSES:
            width = max(len(name) for name in self.classes)
            for row in zip(self.classes, self.train.per_class, self.test.per_class):
                lines.append("  {:{}}  {:>7,} {:>7,}".format(row[0], width, *row[1:]))
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def summarize(dataset: Dataset, checked: str, official: tuple[int, int] | None = None) -> Summary:
    """Count a data set; image files are checked for what they are, and one of every class is decoded."""
    train, test = (split_summary(split, len(dataset.classes)) for split in (dataset.train, dataset.test))
    notes = []
    if official is not None and (train.samples, test.samples) != official:
        notes.append(f"the official set has {official[0]:,} and {official[1]:,} samples")
    return Summary(dataset.name, dataset.kind, dataset.classes, train, test, checked, tuple(notes))


def split_summary(split: Samples | Files, classes: int) -> SplitSummary:
    counts = Counter(split.labels.tolist())
    per_class = tuple(counts[label] for label in range(classes))
    if isinstance(split, Files):
        return SplitSummary(len(split), per_class, "image files", check_files(split))
    shape = " x ".join(str(size) for size in split.inputs.shape[1:])
    kind = str(split.inputs.dtype).removeprefix("torch.")
    return SplitSummary(len(split), per_class, f"{shape} {kind}", split.inputs.nbytes)


def check_files(files: Files) -> int:
    """Bytes of all the files, each begun like an image, the first of every class decoded in full."""
    total, seen = 0, set()
    for path, label in zip(files.paths, files.targets):
        try:
            with open(path, "rb") as file:
                head = file.read(8)
                total += file.seek(0, 2)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; unpack the set again") from error
        if not head.startswith(SIGNATURES):
            found = f"begins with {head.hex()}" if head else "is empty"
            raise DataError(f"{path} is not an image: it {found}; unpack the set again")
        if label not in seen:
            read_image(path)
            seen.add(label)
    return total
