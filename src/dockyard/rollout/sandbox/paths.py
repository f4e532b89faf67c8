"""Translate the paths of a sandbox without namespaces: names inside to names outside, and back.

Only prefixes change. The kernel resolves the rest itself, because absolute links are created with names outside, and
read with names inside. A folder that is shared with the host, such as /usr, has the same name outside; the sandbox's
own root has an empty folder in its place.
"""

from _collections_abc import Callable

UP = b".."


class Paths:
    """The names of one sandbox. All paths are bytes."""

    def __init__(self, root: bytes, moved: dict[bytes, bytes], shared: frozenset[bytes]) -> None:
        """`moved`: top-level folders that are not below `root`.

        `shared`: paths with the same name outside: top-level folders, and paths below those that are moved.
        """
        self.root = root
        self._moved = moved
        self._shared = shared
        self._shared_below = {top: tuple(p for p in shared if p.startswith(top + b"/")) for top in moved}
        self._known: dict[bytes, bytes | None] = {}

    def outside(self, path: bytes) -> bytes | None:
        """Return the name outside of an absolute path; None if it is the same."""
        try:
            return self._known[path]
        except KeyError:
            found = self._find(path)
        if len(self._known) > 4096:
            self._known.clear()
        self._known[path] = found
        return found

    def outside_from(self, path: bytes, folder: Callable[[], bytes | None]) -> bytes | None:
        """Return the same for any path. `folder` returns the name outside of the folder that a relative path starts at.

        That is None if the name is too long: the kernel then resolves the path itself.
        """
        if path[:1] == b"/":
            return self.outside(path)
        parts = path.split(b"/")
        first = next((part for part in parts if part not in (b"", b".")), b"")
        if UP not in parts and not self._is_elsewhere(first):
            return None
        place = folder()
        if place is None:
            return None
        start = self.inside(place)
        if UP in parts:
            normal = _normal(start + b"/" + path)
            if self._climbs_out(start, parts) or _top(normal) != _top(start):
                return self._find(normal) or normal
            return None
        return (self._find(b"/" + path) or _normal(path)) if start == b"/" else None

    def inside(self, path: bytes) -> bytes:
        """Return the name inside of a path as the kernel reports it."""
        for outer, inner in ((self.root, b""), *((place, b"/" + top) for top, place in self._moved.items())):
            if path == outer or path.startswith(outer + b"/"):
                return inner + path[len(outer) :] or b"/"
        return path

    def _find(self, path: bytes) -> bytes | None:
        if path.startswith(self.root + b"/") or path == self.root:
            return None
        plain = path.lstrip(b"/")
        parts = plain.split(b"/")
        if UP in parts or (plain and parts[0] in (b".", b"")):
            normal = _normal(path)
            if parts[0] in (b".", b"") or self._climbs_out(b"/", parts) or _top(normal) != parts[0]:
                return self._find(normal) or normal
        if not self._is_elsewhere(parts[0]):
            return self.root + b"/" + plain
        if parts[0] in self._moved and not self._is_shared(parts[0], plain):
            return self._moved[parts[0]] + plain[len(parts[0]) :]
        return None

    def _is_elsewhere(self, top: bytes) -> bool:
        return top in self._shared or top in self._moved

    def _is_shared(self, top: bytes, plain: bytes) -> bool:
        return any(plain == path or plain.startswith(path + b"/") for path in self._shared_below[top])

    def _climbs_out(self, start: bytes, parts: list[bytes]) -> bool:
        """Whether it leads above the root, or up to it from a folder that has another parent outside."""
        depth = len([part for part in start.split(b"/") if part])
        top = _top(start) or parts[0]
        for part in parts:
            depth += -1 if part == UP else part not in (b"", b".")
            if depth < 0 or (depth == 0 and part == UP and self._is_elsewhere(top)):
                return True
        return False


def _top(path: bytes) -> bytes:
    return path.lstrip(b"/").partition(b"/")[0]


def _normal(path: bytes) -> bytes:
    """Return the path without `.` and `..`, without looking at the file system."""
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == UP:
            parts = parts[:-1]
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/" + b"/".join(parts)
