"""Where a path of a confined sandbox really is: names inside to names outside, and back.

Only beginnings change. The kernel follows everything else itself, because links inside are made with the names outside
(and read with those inside), and because the sandbox's own root has links to what is shared, such as /usr.
"""

from _collections_abc import Callable

UP = b".."


class Paths:
    """The names of one sandbox. All paths are bytes."""

    def __init__(self, root: bytes, moved: dict[bytes, bytes], shared: frozenset[bytes]) -> None:
        """`moved`: top folders that are elsewhere than below `root`; `shared`: those with the same name outside."""
        self.root = root
        self._moved = moved
        self._shared = shared
        self._known: dict[bytes, bytes | None] = {}

    def outside(self, path: bytes) -> bytes | None:
        """The name outside of an absolute path; None where it is the same. `..` is left to the kernel if it can be."""
        try:
            return self._known[path]
        except KeyError:
            found = self._find(path)
        if len(self._known) > 4096:
            self._known.clear()
        self._known[path] = found
        return found

    def outside_from(self, path: bytes, folder: Callable[[], bytes]) -> bytes | None:
        """The same for any path; `folder` gives the name outside of what a relative path begins at."""
        if path[:1] == b"/":
            return self.outside(path)
        if UP not in path or UP not in path.split(b"/"):
            return None
        start = self.inside(folder())
        if not self._climbs_out(start.count(b"/") if start != b"/" else 0, path, is_private=self._is_private(start)):
            return None
        return self._find(_normal(start + b"/" + path)) or _normal(start + b"/" + path)

    def inside(self, path: bytes) -> bytes:
        """The name inside of what the kernel calls `path`."""
        for outer, inner in ((self.root, b""), *((place, b"/" + top) for top, place in self._moved.items())):
            if path == outer or path.startswith(outer + b"/"):
                return inner + path[len(outer) :] or b"/"
        return path

    def _find(self, path: bytes) -> bytes | None:
        if path.startswith(self.root + b"/") or path == self.root:
            return None
        plain = path.lstrip(b"/")
        top, slash, rest = plain.partition(b"/")
        if top in (b".", UP, b"") and plain:
            return self._find(_normal(path))
        is_private = top not in self._shared and top not in self._moved
        if UP in rest and UP in rest.split(b"/") and self._climbs_out(0, plain, is_private=is_private):
            return self._find(_normal(path)) or _normal(path)
        if is_private:
            return self.root + b"/" + plain
        if top in self._moved:
            return self._moved[top] + slash + rest
        return None

    def _is_private(self, inner: bytes) -> bool:
        top = inner.lstrip(b"/").partition(b"/")[0]
        return top not in self._shared and top not in self._moved

    def _climbs_out(self, depth: int, path: bytes, *, is_private: bool) -> bool:
        """Whether it leads above the root, or up to it from a folder whose parent outside is another."""
        for part in path.split(b"/"):
            depth += -1 if part == UP else part not in (b"", b".")
            if depth < 0 or (depth == 0 and part == UP and not is_private):
                return True
        return False


def _normal(path: bytes) -> bytes:
    """Without `.` and `..`, as text."""
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == UP:
            parts = parts[:-1]
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/" + b"/".join(parts)
