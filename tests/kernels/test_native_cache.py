"""The cache of compiled libraries: damage is told before it is loaded, and what others could write is refused."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hyperball.kernels import native

COMPILER = native.find_compiler() if sys.platform != "win32" else None
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder."""
    monkeypatch.setenv("HYPERBALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def code(tmp_path):
    """A source that compiles in no time."""
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return native.Source(path, (), ("-O0",), ("answer",))


def answer_of(code):
    loaded = native.load(code)
    assert loaded.library is not None, loaded.reason
    return loaded.library.answer()


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"not a library", "cut": whole[:4096], "changed": whole[:-1] + b"?"}[how])


@pytest.mark.parametrize("how", ["empty", "text", "cut", "changed"])
def test_a_damaged_library_is_removed_and_built_again(how, code, cache):
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import native; "
        "print(native.load(native.Source(Path(sys.argv[2]), (), ('-O0',), ('answer',))).library.answer())"
    )

    def told() -> str:  # in a process of its own: a library that lacks bytes would end it
        command = [sys.executable, "-c", program, str(Path(native.__file__).parent), str(code.main)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()

    assert told() == "42"
    (path,) = cache.iterdir()
    damage(path, how)
    assert told() == "42"
    (again,) = cache.iterdir()
    assert again.name.endswith(f"-{native.digest(again)}.so")


def test_a_whole_library_is_loaded_without_being_built(code, cache, monkeypatch):
    assert answer_of(code) == 42
    monkeypatch.setattr(native, "_built", lambda *_: pytest.fail("built again"))
    assert answer_of(code) == 42


def test_a_library_in_the_cache_without_the_functions_is_built_again(code, cache, tmp_path):
    native.load(code)
    (path,) = cache.iterdir()
    stem = path.stem.rpartition("-")[0]
    other = tmp_path / "other.c"
    other.write_text("int question(void) { return 6 * 9; }\n")
    path.unlink()
    native._built(COMPILER, native.Source(other, (), ("-O0",)), cache, stem)
    assert answer_of(code) == 42


def test_a_source_without_the_functions_is_a_reason_and_leaves_nothing_behind(code, cache):
    loaded = native.load(code._replace(functions=("answer", "question")))
    assert loaded.library is None
    assert "has no question" in loaded.reason
    assert list(cache.iterdir()) == []


def test_a_compiler_that_writes_nothing_is_a_reason_and_leaves_nothing_behind(code, cache, monkeypatch):
    monkeypatch.setenv("CC", "true")
    loaded = native.load(code)
    assert loaded.library is None
    assert loaded.reason.startswith("building answer.c failed: ")
    assert list(cache.iterdir()) == []


def test_a_library_that_others_may_write_is_not_loaded(code, cache):
    native.load(code)
    (path,) = cache.iterdir()
    path.chmod(0o666)
    assert "may be written by others" in native.load(code).reason


@pytest.mark.parametrize("mode, refused", [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_folder_below_one_that_all_may_write_is_refused_unless_that_is_sticky(mode, refused, code, cache, tmp_path):
    tmp_path.chmod(mode)
    loaded = native.load(code)
    assert (loaded.library is None) == refused
    assert ("may be written by all" in loaded.reason) == refused
    tmp_path.chmod(0o700)


def test_the_compilers_arguments_are_used_and_tell_libraries_apart(code, cache, monkeypatch):
    code.main.write_text("int answer(void) { return ANSWER; }\n")
    for number in (7, 8):
        monkeypatch.setenv("CC", f"{COMPILER[0]} -DANSWER={number}")
        assert answer_of(code) == number
    assert len(list(cache.iterdir())) == 2


def test_an_unreadable_compiler_variable_is_a_reason(code, cache, monkeypatch):
    monkeypatch.setenv("CC", "cc 'unfinished")
    assert native.load(code).library is None


def test_a_relative_cache_folder_is_resolved(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HYPERBALL_CACHE", "link/../link")
    assert native.cache_folder() == (tmp_path / "real").resolve()


@pytest.fixture
def open_umask():
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_folders_above_the_cache_are_made_for_this_user_alone_whatever_the_umask(
    code, monkeypatch, tmp_path, open_umask
):
    tmp_path.chmod(0o700)
    folder = tmp_path / "one" / "two" / "cache"
    monkeypatch.setenv("HYPERBALL_CACHE", str(folder))
    assert answer_of(code) == 42
    assert {stat.S_IMODE(made.stat().st_mode) for made in (folder, *folder.parents[:2])} == {0o700}


@pytest.mark.parametrize("held", [(), ("something",)])
def test_a_folder_under_the_name_of_a_library_makes_way_for_it(held, code, cache):
    native.load(code)
    (path,) = cache.iterdir()
    path.unlink()
    path.mkdir(mode=0o775)
    for name in held:
        (path / name).write_text("in the way")
    assert answer_of(code) == 42
    (again,) = cache.iterdir()
    assert again.is_file()
