"""A path is accepted only if nobody but root and its user can change it. Some tests need root, to become others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory, opened_directory, path_in
from tests.users import NOBODY, needs_root


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory of mode 755 below directories of ours."""
    base = tmp_path / "base"
    base.mkdir(mode=0o755)
    return base


@pytest.fixture(autouse=True)
def _closes_its_fds() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    # The garbage collector may close some of earlier tests.
    assert set(os.listdir("/proc/self/fd")) <= before


def refusal(path: Path, trust: Trust = Trust.PRIVATE) -> str:
    with pytest.raises(UnsafeDirectory) as caught:
        check_directory(path, trust)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path} is not safe: ")
    return line


def test_missing_directories_are_made_for_this_user_only_whatever_the_umask(base: Path) -> None:
    previous = os.umask(0)
    try:
        with opened_directory(base / "a" / "b", Trust.PRIVATE) as fd:
            assert os.path.samefile(f"/proc/self/fd/{fd}", base / "a" / "b")
            Path(path_in(fd, "file")).write_text("kept")
    finally:
        os.umask(previous)
    assert [(base / made).stat().st_mode & 0o777 for made in ("a", "a/b")] == [0o700, 0o700]
    assert (base / "a" / "b" / "file").read_text() == "kept"
    with pytest.raises(FileNotFoundError):
        check_directory(base / "c", Trust.READABLE, create=False)
    with pytest.raises(FileNotFoundError):
        check_directory(base / "c", Trust.SHARED)
    assert not (base / "c").exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o720])
def test_directory_above_that_others_can_write_is_refused_with_the_remedy(base: Path, mode: int) -> None:
    (base / "a" / "b").mkdir(parents=True, mode=0o700)
    (base / "a").chmod(mode)
    line = refusal(base / "a" / "b")
    assert f"other users can change the directory {base}/a, which has mode {mode:o} and owner {os.geteuid()} (" in line
    assert "); chmod " in line
    (base / "a").chmod(mode | 0o1000)  # sticky: others can make files of their own there, and cannot replace ours
    check_directory(base / "a" / "b", Trust.PRIVATE)
    refusal(base / "a")


def test_last_directory_of_each_kind(base: Path) -> None:
    base.chmod(0o755)
    assert f"other users can enter the directory {base}, which has mode 755" in refusal(base)
    check_directory(base, Trust.READABLE)
    check_directory(base, Trust.SHARED)
    base.chmod(0o775)
    assert "; chmod go-w " in refusal(base, Trust.READABLE)
    check_directory(base, Trust.SHARED)  # a group that may use the socket
    base.chmod(0o777)
    assert "; chmod o-w " in refusal(base, Trust.SHARED)
    base.chmod(0o1777)
    check_directory(base, Trust.SHARED)
    refusal(base, Trust.READABLE)


def test_symbolic_links_are_followed_and_their_targets_checked(base: Path) -> None:
    (base / "real" / "in").mkdir(parents=True, mode=0o700)
    (base / "absolute").symlink_to(base / "real")
    (base / "relative").symlink_to("../base/./real/")
    (base / "up").symlink_to("real/in/..")
    (base / "root").symlink_to("/")
    (base / "loop").symlink_to("loop")
    (base / "dangling").symlink_to("made")
    with opened_directory(base / "absolute" / "in" / ".." / ".." / "relative" / "in", Trust.PRIVATE) as fd:
        assert os.path.samestat(os.fstat(fd), (base / "real" / "in").stat())
    (base / "real").chmod(0o700)
    check_directory(base / "up", Trust.PRIVATE)
    check_directory(base / "root", Trust.READABLE)
    check_directory(base / "dangling", Trust.PRIVATE)
    assert (base / "made").is_dir()
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        check_directory(base / "loop", Trust.PRIVATE)
    (base / "real").chmod(0o777)
    for link in ("absolute", "relative"):
        assert f"the directory {base / 'real'}, which" in refusal(base / link / "in").replace(
            "/base/../base/.", "/base"
        )


def test_file_in_the_way_is_named(base: Path) -> None:
    (base / "file").write_text("")
    for path in (base / "file", base / "file" / "in"):
        with pytest.raises(NotADirectoryError):
            check_directory(path, Trust.PRIVATE)


@needs_root
def test_what_belongs_to_another_user_is_refused(base: Path) -> None:
    (base / "theirs").mkdir(mode=0o755)
    os.chown(base / "theirs", NOBODY, NOBODY)
    (base / "theirs" / "ours").mkdir(mode=0o700)
    assert f"the directory {base}/theirs has mode 755 and owner 65534 (nobody); its owner must be 0 (root)" in refusal(
        base / "theirs" / "ours"
    )
    for trust in Trust:
        refusal(base / "theirs", trust)
    (base / "link").symlink_to(base)
    os.chown(base / "link", NOBODY, NOBODY, follow_symlinks=False)
    base.chmod(0o700)
    assert f"the symbolic link {base}/link has mode 777 and owner 65534 (nobody)" in refusal(base / "link")


@needs_root
def test_user_may_have_a_directory_below_roots_but_not_roots_own(base: Path) -> None:
    home = Path("/tmp") / f"ps-home-{os.getpid()}"  # noqa: S108 - the test is about a sticky directory
    home.mkdir(mode=0o700)
    os.chown(home, NOBODY, NOBODY)
    base.chmod(0o700)
    previous = os.geteuid()
    os.seteuid(NOBODY)
    try:
        check_directory(home, Trust.PRIVATE)
        assert refusal(Path("/")).endswith("its owner must be 65534 (nobody); choose another path")
        check_directory(Path("/usr/bin"), Trust.READABLE)
        with pytest.raises(PermissionError):
            check_directory(base / "in", Trust.PRIVATE)
    finally:
        os.seteuid(previous)
        home.rmdir()
