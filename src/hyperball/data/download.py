"""Official downloads: to a partial file that can be continued, checked, then renamed; archives unpacked beside, then
renamed. Nothing half-written ever has the name of something whole."""

import hashlib
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from hyperball.data.errors import DataError, one_line

CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all


@dataclass(frozen=True)
class Resource:
    """A published file: its address, its checksum ("md5:..." or "sha256:..."), and the folder it unpacks to."""

    url: str
    checksum: str
    folder: str
    archive: bool = True

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


def fetch(resource: Resource, root: Path, progress: Progress | None = None) -> Path:
    """Bring a resource into `root`: an archive unpacked to its folder, a plain file put into it.

    A folder that exists is left alone: another process made it, or its reader says what is wrong with it.
    """
    target = root / resource.folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root):
            if not resource.archive:
                if not (target / resource.file.removesuffix(".gz")).exists():
                    download(resource, target, progress)
            elif not target.exists():
                path = download(resource, root, progress)
                unpack(path, target)
                path.unlink()
    except OSError as error:
        raise DataError(f"cannot write to {error.filename or root}: {error.strerror or error}") from error
    return target


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder's downloads, where the system can lock a folder."""
    descriptor = None
    with suppress(ImportError, OSError):
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def download(resource: Resource, folder: Path, progress: Progress | None = None) -> Path:
    """The verified file in `folder`; one that is there already (put by hand, say) is only verified."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / resource.file
    if path.exists():
        verify(path, resource)
        return path
    partial = path.with_name(path.name + ".part")
    receive(resource.url, partial, folder, progress)
    try:
        verify(partial, resource)
    except DataError:
        partial.unlink()
        raise
    os.replace(partial, path)
    return path


def receive(url: str, partial: Path, folder: Path, progress: Progress | None) -> None:
    """Append to the partial file from where it ends, or begin again where the server cannot continue."""
    start = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "hyperball", "Range": f"bytes={start}-"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            continued = response.status == 206
            start = start if continued else 0
            length = response.headers.get("Content-Length")
            total = start + int(length) if length else None
            with open(partial, "ab" if continued else "wb") as file:
                done = copy(response, file, start, lambda n: progress and progress(partial.stem, n, total))
        if total is not None and done != total:
            raise DataError(f"{url} ended after {done:,} of {total:,} bytes; run it again to continue")
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing is left to send: the checksum decides
            return
        raise DataError(
            f"{url} answers {error.code} {error.reason}; put {partial.stem} into {folder} by hand"
        ) from error
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error) or type(error).__name__
        advice = f"without a network, put {partial.stem} into {folder} by hand and run it again"
        raise DataError(f"cannot reach {url} ({reason}); {advice}") from error


def copy(source: IO[bytes], target: IO[bytes], done: int, report: Callable[[int], object]) -> int:
    """Copy a stream to its end and return the bytes that the target then holds."""
    while chunk := source.read(CHUNK):
        target.write(chunk)
        done += len(chunk)
        report(done)
    return done


def verify(path: Path, resource: Resource) -> None:
    """Refuse a file whose checksum is not the published one."""
    kind, _, expected = resource.checksum.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    if found != expected:
        message = f"{path} has {kind.upper()} {found}, {resource.url} is published with {expected}"
        raise DataError(f"{message}; delete it and download it again")


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive whose single folder becomes `target`; nothing is written outside of it."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as temporary:
        try:
            if archive.suffix == ".zip":
                extract_zip(archive, Path(temporary))
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise DataError(
                f"{archive} cannot be unpacked ({one_line(error)}); delete it and download it again"
            ) from error
        inner = Path(temporary, target.name)
        if not inner.is_dir():
            raise DataError(f"{archive} has no folder {target.name}; it is not the archive it is named as")
        os.replace(inner, target)


def extract_zip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise DataError(f"{archive} has an entry outside of its folder, {name!r}; do not use it")
        file.extractall(folder)


TORONTO = "https://www.cs.toronto.edu/~kriz"
MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION_MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"


def idx_files(mirror: str, folder: str, *sums: str) -> tuple[Resource, ...]:
    files = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Resource(f"{mirror}/{name}-ubyte.gz", f"md5:{md5}", folder, archive=False) for name, md5 in zip(files, sums)
    )


RESOURCES: dict[str, tuple[Resource, ...]] = {
    "cifar10": (
        Resource(f"{TORONTO}/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"),
    ),
    "cifar100": (
        Resource(f"{TORONTO}/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary"),
    ),
    "mnist": idx_files(
        MNIST_MIRROR,
        "mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": idx_files(
        FASHION_MIRROR,
        "fashion-mnist",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "modelnet40": (
        Resource(
            "https://shapenet.cs.stanford.edu/media/modelnet40_ply_hdf5_2048.zip",
            "md5:c9ab8e6dfb16f67afdab25e155c79e59",
            "modelnet40_ply_hdf5_2048",
        ),
    ),
    "imagewoof": (
        Resource(
            "https://s3.amazonaws.com/fast-ai-imageclas/imagewoof2-320.tgz",
            "sha256:4e4905ed7643120daaf9bf3b2ef7f3a7e8396d9bdaf254a38c6f01f618b4973d",
            "imagewoof2-320",
        ),
    ),
    "tiny-imagenet": (
        Resource(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "md5:90528d7ca1a48142e341f4ef8d21d0de",
            "tiny-imagenet-200",
        ),
    ),
}
