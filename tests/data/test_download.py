"""Downloads from a server on this machine: checked, continued, atomic, and refused in one line."""

import hashlib
import io
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from data_files import TINY_CIFAR10, TINY_MNIST, write_cifar, write_idx

from hyperball import data
from hyperball.data import DataError, catalog
from hyperball.data import download as downloads
from hyperball.data.download import RESOURCES, Resource, download, fetch
from hyperball.data.readers.cifar import read_cifar
from hyperball.data.readers.idx import read_idx_set


class Server:
    """Files by path; `ranges` says whether a download can be continued, `cut` after how many bytes one ends."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ranges, self.cut = True, None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/{name}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name, wanted = handler.path[1:], handler.headers.get("Range")
        self.requests.append((name, wanted))
        if name not in self.files:
            handler.send_error(404)
            return
        content, start = self.files[name], 0
        if self.ranges and wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(206 if self.ranges else 200)
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        handler.wfile.write(content[start:] if self.cut is None else content[start : self.cut])


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def checksum(content: bytes, kind: str = "md5") -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def tar_of(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, folder.name)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_file_arrives_whole_and_verified(tmp_path: Path, server: Server, kind: str) -> None:
    server.files["x.bin"] = content = bytes(range(256)) * 9000
    resource = Resource(server.url("x.bin"), checksum(content, kind), "x", archive=False)
    seen: list[tuple[str, int, int | None]] = []
    path = download(resource, tmp_path, lambda *values: seen.append(values))
    assert path.read_bytes() == content
    assert seen[-1] == ("x.bin", len(content), len(content))
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_download_continues_or_begins_again(tmp_path: Path, server: Server, ranges: bool) -> None:
    server.files["x.bin"] = content = bytes(range(256)) * 100
    resource = Resource(server.url("x.bin"), checksum(content), "x", archive=False)
    server.ranges, server.cut = ranges, 10_000
    with pytest.raises(DataError, match=r"x\.bin"):
        download(resource, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin.part"]
    server.cut = None
    assert download(resource, tmp_path).read_bytes() == content
    assert server.requests[-1] == ("x.bin", "bytes=10000-")
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_partial_file_that_is_whole_is_taken(tmp_path: Path, server: Server) -> None:
    server.files["x.bin"] = content = b"abc"
    (tmp_path / "x.bin.part").write_bytes(content)
    resource = Resource(server.url("x.bin"), checksum(content), "x", archive=False)
    assert download(resource, tmp_path).read_bytes() == content


def test_wrong_checksum_leaves_nothing_behind(tmp_path: Path, server: Server) -> None:
    server.files["x.bin"] = b"changed"
    resource = Resource(server.url("x.bin"), checksum(b"original"), "x", archive=False)
    with pytest.raises(DataError, match=r"MD5 .* is published with"):
        download(resource, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_file_put_by_hand_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"by hand")
    resource = Resource("http://127.0.0.1:9/x.bin", checksum(b"by hand"), "x", archive=False)
    assert download(resource, tmp_path).read_bytes() == b"by hand"
    with pytest.raises(DataError, match=r"x\.bin has MD5"):
        download(replace(resource, checksum=checksum(b"other")), tmp_path)


def test_no_network_is_said_in_one_line(tmp_path: Path) -> None:
    resource = Resource("http://127.0.0.1:9/x.tar.gz", "md5:0", "x")
    with pytest.raises(DataError, match=r"cannot reach http.*x\.tar\.gz.*put x\.tar\.gz into .* by hand") as caught:
        fetch(resource, tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_address_is_said_in_one_line(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match="answers 404"):
        fetch(Resource(server.url("gone.tar.gz"), "md5:0", "x"), tmp_path)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".zip"])
def test_archive_is_unpacked_to_its_folder(tmp_path: Path, server: Server, suffix: str) -> None:
    source = tmp_path / "source" / "inner"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file.txt").write_text("hello")
    if suffix == ".zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.write(source / "deep" / "file.txt", "inner/deep/file.txt")
        content = buffer.getvalue()
    else:
        content = tar_of(source)
    server.files["a" + suffix] = content
    root = tmp_path / "root"
    fetch(Resource(server.url("a" + suffix), checksum(content), "inner"), root)
    assert (root / "inner" / "deep" / "file.txt").read_text() == "hello"
    assert [path.name for path in root.iterdir()] == ["inner"]


def hostile_tar(name: str, link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        if link:
            member.type, member.linkname = tarfile.SYMTYPE, link
        else:
            member.size = 4
        tar.addfile(member, None if link else io.BytesIO(b"evil"))
    return buffer.getvalue()


def hostile_zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "evil")
    return buffer.getvalue()


HOSTILE = {
    "tar up": ("a.tar.gz", hostile_tar("../evil")),
    "tar link": ("a.tar.gz", hostile_tar("inner", "/etc")),
    "zip up": ("a.zip", hostile_zip("../evil")),
    "zip absolute": ("a.zip", hostile_zip("/evil")),
    "not an archive": ("a.tar.gz", b"nothing"),
    "not a zip": ("a.zip", b"nothing"),
    "cut short": ("a.tar.gz", hostile_tar("inner/x")[:-20]),
    "another folder": ("a.tar.gz", hostile_tar("outer/x")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_or_broken_archive_writes_nothing(tmp_path: Path, case: str) -> None:
    name, content = HOSTILE[case]
    root = tmp_path / "root"
    root.mkdir()
    (root / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as caught:
        fetch(Resource(f"http://127.0.0.1:9/{name}", checksum(content), "inner"), root)
    assert "\n" not in str(caught.value)
    assert [path.name for path in root.iterdir()] == [name]
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_folder_that_is_not_whole_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "mine.txt").write_text("keep")
    fetch(Resource("http://127.0.0.1:9/a.zip", "md5:0", "inner"), tmp_path)
    assert (tmp_path / "inner" / "mine.txt").read_text() == "keep"


def test_failing_disk_is_said_in_one_line_and_leaves_the_partial_file(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["x.bin"] = content = bytes(1000)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device", "x.bin.part")

    monkeypatch.setattr(downloads, "copy", full)
    with pytest.raises(DataError, match=r"cannot write to .*: No space left on device"):
        fetch(Resource(server.url("x.bin"), checksum(content), "x", archive=False), tmp_path)
    assert not (tmp_path / "x" / "x.bin").exists()


def test_load_downloads_an_archive_once(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tar_of(write_cifar(tmp_path / "source", TINY_CIFAR10))
    server.files["c.tar.gz"] = content
    resource = Resource(server.url("c.tar.gz"), checksum(content), TINY_CIFAR10.folder)
    entry = replace(catalog.SETS["cifar10"], read=partial(read_cifar, layout=TINY_CIFAR10))
    monkeypatch.setitem(catalog.SETS, "cifar10", entry)
    monkeypatch.setitem(RESOURCES, "cifar10", (resource,))
    root = tmp_path / "root"
    for _ in range(2):
        assert len(data.load("cifar10", root, download=True).train) == 20
    assert len(server.requests) == 1


def test_load_downloads_only_the_idx_files_that_are_missing(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_idx(tmp_path / "source", TINY_MNIST, packed=True)
    for path in source.iterdir():
        server.files[path.name] = path.read_bytes()
    resources = tuple(
        Resource(server.url(name), checksum(content), "mnist", archive=False) for name, content in server.files.items()
    )
    entry = replace(catalog.SETS["mnist"], read=partial(read_idx_set, layout=TINY_MNIST))
    monkeypatch.setitem(catalog.SETS, "mnist", entry)
    monkeypatch.setitem(RESOURCES, "mnist", resources)
    root = tmp_path / "root"
    plain = write_idx(root, TINY_MNIST)
    (plain / "t10k-labels-idx1-ubyte").unlink()
    assert len(data.load("mnist", root, download=True).test) == 5
    assert [name for name, _ in server.requests] == ["t10k-labels-idx1-ubyte.gz"]


def test_processes_that_download_at_once_share_one_download(tmp_path: Path, server: Server) -> None:
    source = tmp_path / "source" / "inner"
    source.mkdir(parents=True)
    (source / "file.txt").write_text("hello")
    server.files["a.tgz"] = content = tar_of(source)
    resource = Resource(server.url("a.tgz"), checksum(content), "inner")
    root = tmp_path / "root"
    root.mkdir()
    threads = [threading.Thread(target=fetch, args=(resource, root)) for _ in range(4)]
    with downloads.exclusive(root):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in root.iterdir()] == ["inner"]
    assert len(server.requests) == 1


def test_set_with_a_missing_file_is_named_even_when_asked_to_download(tmp_path: Path) -> None:
    (write_cifar(tmp_path, TINY_CIFAR10) / "data_batch_1.bin").unlink()
    (tmp_path / TINY_CIFAR10.folder / "data_batch_2.bin").rename(tmp_path / TINY_CIFAR10.folder / "data_batch_1.bin")
    with pytest.raises(DataError, match=r"data_batch_1\.bin has .* bytes"):
        data.load("cifar10", tmp_path, download=True)


@pytest.mark.parametrize("name, advice", [("imagenet", "image-net.org"), ("folder", "train/CLASS")])
def test_set_without_a_download_says_what_to_do(tmp_path: Path, name: str, advice: str) -> None:
    with pytest.raises(DataError, match=f"{name} cannot be downloaded; .*{advice}"):
        data.load(name, tmp_path, download=True)


def test_every_resource_has_a_checksum_and_a_folder_its_reader_knows() -> None:
    lengths = {"md5": 32, "sha256": 64}
    for resources in RESOURCES.values():
        for resource in resources:
            kind, _, value = resource.checksum.partition(":")
            assert len(value) == lengths[kind]
            assert int(value, 16) >= 0


@pytest.mark.parametrize(
    "name, module, extra", [("digits", "sklearn.datasets", "train"), ("modelnet40", "h5py", "train")]
)
def test_missing_package_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    from data_files import write_modelnet

    write_modelnet(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"pip install 'hyperball\[{extra}\]'"):
        data.load(name, tmp_path)
