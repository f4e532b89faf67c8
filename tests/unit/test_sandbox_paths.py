"""Where the paths of a sandbox without namespaces really are, and what lies below them."""

import posixpath
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard.rollout.sandbox.paths import Paths
from dockyard.rollout.sandbox.watcher import Folder

ROOT = b"/tmp/dy-1/root"
PATHS = Paths(
    ROOT,
    {b"etc": b"/tmp/dy-1/etc", b"dev": b"/tmp/dy-1/dev"},
    frozenset((b"usr", b"bin", b"proc", b"etc/alternatives", b"dev/null")),
)
NAMES = st.sampled_from([b"app", b"tmp", b"usr", b"etc", b"dev", b"x", b"..", b".", b""])


def nowhere() -> bytes:
    raise AssertionError("an absolute path begins nowhere else")


@pytest.mark.parametrize(
    ("path", "outside"),
    [
        (b"/", ROOT + b"/"),
        (b"/app/x", ROOT + b"/app/x"),
        (b"//app//x", ROOT + b"/app//x"),
        (b"/./app", ROOT + b"/app"),
        (b"/../app", ROOT + b"/app"),
        (b"/unheard/of", ROOT + b"/unheard/of"),
        (b"/usr/bin/ls", None),
        (b"/usrx", ROOT + b"/usrx"),
        (b"/usr/lib/gcc/../crt1.o", None),
        (b"/usr/../app/x", ROOT + b"/app/x"),
        (b"/usr/bin/../../../etc/passwd", b"/tmp/dy-1/etc/passwd"),
        (b"/app/../etc/passwd", b"/tmp/dy-1/etc/passwd"),
        (b"/app/../tmp/x", ROOT + b"/tmp/x"),
        (b"/app/a/../x", ROOT + b"/app/a/../x"),  # the kernel knows where a link leads
        (b"/app/../../work", ROOT + b"/work"),
        (b"/etc/passwd", b"/tmp/dy-1/etc/passwd"),
        (b"/etc/../work/secret", ROOT + b"/work/secret"),
        (b"/dev/null", None),
        (b"/dev/shm/x", b"/tmp/dy-1/dev/shm/x"),
        (b"/etc/alternatives/awk", None),
        (b"/etc/alternativesx", b"/tmp/dy-1/etc/alternativesx"),
        (ROOT + b"/app/x", None),
    ],
)
def test_an_absolute_path_has_its_place_outside(path: bytes, outside: bytes | None):
    assert PATHS.outside(path) == outside
    assert PATHS.outside_from(path, nowhere) == outside


@pytest.mark.parametrize(
    ("folder", "path", "outside"),
    [
        (ROOT + b"/app", b"x/y", None),
        (ROOT + b"/app", b"x/../y", None),
        (ROOT + b"/app", b"../tmp", ROOT + b"/tmp"),
        (ROOT + b"/app/a", b"../x", None),
        (ROOT, b"usr/bin", b"/usr/bin"),
        (ROOT, b"etc/passwd", b"/tmp/dy-1/etc/passwd"),
        (ROOT, b"app/x", None),
        (ROOT + b"/app", b"usr/bin", None),
        (ROOT + b"/app", b"../usr/bin", b"/usr/bin"),
        (ROOT + b"/app", b"../../x", ROOT + b"/x"),
        (ROOT, b"..", ROOT + b"/"),
        (b"/usr/lib", b"../bin/ls", None),
        (b"/usr/lib", b"../../app/x", ROOT + b"/app/x"),
        (b"/usr", b"../usr/bin", b"/usr/bin"),
        (b"/tmp/dy-1/etc", b"../root/x", ROOT + b"/root/x"),
        (ROOT + b"/app", b"a..b", None),
    ],
)
def test_a_relative_path_is_left_to_the_kernel_unless_it_climbs_out(folder: bytes, path: bytes, outside: bytes | None):
    assert PATHS.outside_from(path, lambda: folder) == outside


@given(st.lists(NAMES, min_size=1, max_size=8))
def test_no_path_leads_outside_but_to_what_is_shared_and_back_again(names: list[bytes]):
    path = b"/" + b"/".join(names)
    outside = PATHS.outside(path)
    reached = b"/" + posixpath.normpath(path if outside is None else outside).lstrip(b"/")
    wanted = b"/" + posixpath.normpath(path).lstrip(b"/")
    shared = (b"/usr", b"/bin", b"/proc")
    assert reached.startswith((b"/tmp/dy-1/root", b"/tmp/dy-1/etc", b"/tmp/dy-1/dev", *shared))
    assert PATHS.inside(reached) == wanted


def test_a_folder_that_is_removed_while_it_is_measured_counts_nothing(tmp_path: Path):
    (tmp_path / "gone").mkdir()
    folder = Folder(str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    assert folder.measure() == 0
    folder.close()
