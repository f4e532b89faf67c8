"""Read git repositories without a checkout. Patches are applied in a temporary index.

A repository is a local checkout or bundle if there is one, and is fetched otherwise. Local ones are never changed.
"""

import gzip
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HEAD = "refs/dockyard/head"
"""The name of the original repository's HEAD in the working copy."""
_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TIMEOUT_S = 1800.0  # the largest repositories take minutes to clone
_NO_USER_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_LITERAL_PATHSPECS": "1"}
_ALWAYS_THE_SAME = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in {"NAME": "c2bug", "EMAIL": "c2bug@localhost", "DATE": "2000-01-01T00:00:00Z"}.items()
}
_EMPTY_TAR = bytes(10240)
# Archives contain the files exactly as in the tree, regardless of its `.gitattributes`.
_ATTRIBUTES = "* -export-ignore -export-subst -text -eol -ident -filter -working-tree-encoding\n"


class GitError(Exception):
    """An error message of git."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A temporary bare repository, which may use the objects of another one."""

    git_dir: Path

    def commit(self, name: str) -> str:
        """Return the full id of a commit."""
        return self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")

    def tree(self, commit: str) -> str:
        """Return the id of a commit's tree."""
        return self._git("rev-parse", "--verify", f"{commit}^{{tree}}")

    def apply(self, tree: str, patch: str, *, reverse: bool = False) -> str:
        """Return the tree after applying a patch."""
        whole = patch if patch.endswith("\n") else f"{patch}\n"  # datasets often lack the last newline
        options = ["--whitespace=nowarn", *(["--reverse"] if reverse else [])]
        return self._in_index(tree, ["apply", "--cached", *options], whole.encode())

    def without(self, tree: str, paths: Sequence[str]) -> str:
        """Return the tree without these files and folders."""
        if not paths:
            return tree
        return self._in_index(tree, ["rm", "-r", "--cached", "--quiet", "--ignore-unmatch", "--", *paths])

    def paths(self, tree: str) -> list[str]:
        """Return the paths of all files in the tree."""
        return _split(self._git("ls-tree", "-r", "-z", "--name-only", "--full-tree", tree))

    def changed(self, old: str, new: str) -> list[str]:
        """Return the paths of the files that differ."""
        return _split(self._git("diff-tree", "-r", "-z", "--name-only", "--no-renames", old, new))

    def diff(self, old: str, new: str) -> str:
        """Return the patch from the old tree to the new one."""
        return _text(self._run("diff-tree", "-r", "-p", "--binary", "--full-index", "--no-renames", old, new))

    def archive(self, tree: str, paths: Sequence[str] | None = None) -> bytes:
        """Return a gzipped tar of the tree, or of these paths. The same tree gives the same bytes."""
        if paths is not None and not paths:
            return gzip.compress(_EMPTY_TAR, mtime=0)  # without paths git would archive everything
        commit = self._git(
            "commit-tree", tree, "-m", "archived"
        )  # the archive of a plain tree would contain the current time
        return self._run("archive", "--format=tar.gz", commit, *(["--", *paths] if paths else []))

    def _in_index(self, tree: str, command: Sequence[str], stdin: bytes = b"") -> str:
        with tempfile.TemporaryDirectory(prefix="dockyard-index-") as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder, "index")), "GIT_WORK_TREE": folder}
            self._run("read-tree", tree, env=index)
            self._run(*command, env=index, stdin=stdin)
            return _text(self._run("write-tree", env=index)).strip()

    def _git(self, *args: str) -> str:
        return _text(self._run(*args)).strip()

    def _run(self, *args: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> bytes:
        ours = {"GIT_DIR": str(self.git_dir), **_NO_USER_SETTINGS, **_ALWAYS_THE_SAME, **(env or {})}
        return run_git(args, env=ours, stdin=stdin)


@dataclass(slots=True)
class Repositories:
    """Finds repositories and opens each once, in a working folder that the caller removes."""

    work: Path
    local: Path | None = None
    """A folder with checkouts and bundles."""
    _open: dict[str, Repository] = field(default_factory=dict[str, Repository])
    _broken: dict[str, str] = field(default_factory=dict[str, str])

    def find(self, repo: str, source: str | None = None) -> str:
        """Return where to read `owner/name` from: the row's own source, a local repository, or GitHub."""
        named = source or (repo if _is_address(repo) else None)
        if named:
            return self._resolved(named)
        return str(self._in_folder(repo) or f"https://github.com/{repo}.git")

    def open(self, address: str, commit: str | None) -> Repository:
        """Return a repository with this commit. None: its HEAD, which is named `HEAD` in the working copy."""
        if address in self._broken:
            raise GitError(self._broken[address])
        repository = self._open.get(address)
        if repository is None:
            repository = self._open[address] = _new(self.work / str(len(self._open)))
        try:
            _provide(repository, address, commit)
        except GitError as error:
            self._broken[address] = f"the repository `{address}` cannot be read: {error}"
            raise GitError(self._broken[address]) from None
        return repository

    def _resolved(self, named: str) -> str:
        inside = self.local / named if self.local else None
        return (
            str(inside)
            if inside and os.path.exists(inside)
            else str(Path(named).expanduser())
            if _is_path(named)
            else named
        )

    def _in_folder(self, repo: str) -> Path | None:
        if self.local is None:
            return None
        names = dict.fromkeys((repo, repo.replace("/", "__"), repo.replace("/", "-"), repo.rpartition("/")[2]))
        places = (self.local / f"{name}{ending}" for name in names for ending in ("", ".git", ".bundle"))
        return next((place for place in places if os.path.exists(place)), None)


def run_git(args: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> bytes:
    """Run a git command and return its output. It never asks for a password."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or _is_of_user(name)}
    plain = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            ["git", *args], input=stdin, capture_output=True, env=around | plain | dict(env or {}), timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        raise GitError("`git` is not installed") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"`git {args[0]}` took longer than {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise GitError(_reason(_text(done.stderr)) or f"`git {args[0]}` ended with {done.returncode}")
    return done.stdout


def _is_of_user(name: str) -> bool:
    """Keep the user's variables for reaching servers, not those that select a repository."""
    return name.startswith(("GIT_SSH", "GIT_SSL", "GIT_ASKPASS", "GIT_PROXY", "GIT_CONFIG"))


def _is_address(repo: str) -> bool:
    return "://" in repo or repo.startswith((".", "/", "~", "git@")) or repo.endswith((".bundle", ".git"))


def _is_path(address: str) -> bool:
    return "://" not in address and not re.match(r"[\w.-]+@[\w.-]+:", address)


def _new(git_dir: Path) -> Repository:
    run_git(["init", "--quiet", "--bare", "--", str(git_dir)], env=_NO_USER_SETTINGS)
    (git_dir / "info").mkdir(exist_ok=True)
    (git_dir / "info" / "attributes").write_text(_ATTRIBUTES)
    return Repository(git_dir)


def _provide(repository: Repository, address: str, commit: str | None) -> None:
    """Fetch the commit if necessary. The caller must check whether it exists."""
    path = Path(address)
    if _is_path(address) and os.path.isdir(path):  # unlike `Path.is_dir`, it accepts invalid names
        _borrow(repository, path)
    elif not _has(repository, commit):
        _fetch(repository, str(path.absolute()) if os.path.isfile(path) else address, commit)


def _borrow(repository: Repository, path: Path) -> None:
    inside = ["-C", str(path), "rev-parse"]
    objects = path / _text(run_git([*inside, "--git-path", "objects"])).strip()
    alternates = repository.git_dir / "objects" / "info" / "alternates"
    alternates.write_text(f"{objects.resolve()}\n")
    head = _text(run_git([*inside, "--verify", "HEAD"])).strip()
    refs = _text(run_git(["-C", str(path), "for-each-ref", "--format=%(objectname) %(refname)"]))
    (repository.git_dir / "packed-refs").write_text(f"{refs.rstrip()}\n{head} {HEAD}\n")


def _fetch(repository: Repository, address: str, commit: str | None) -> None:
    """Fetch one commit if the server allows that, otherwise everything."""
    into = [f"--git-dir={repository.git_dir}", "fetch", "--quiet", "--no-tags"]
    if commit is None:
        run_git([*into, "--depth=1", "--", address, f"+HEAD:{HEAD}"])
        return
    if _SHA.fullmatch(commit) and "://" in address:
        try:
            run_git([*into, "--depth=1", "--", address, commit])
            return
        except GitError:  # not every server allows fetching a commit by its id
            pass
    run_git([*into, "--", address, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"])
    if not _has(repository, commit):
        with suppress(GitError):  # a bundle may contain only HEAD, or no HEAD
            run_git([*into, "--", address, f"+HEAD:{HEAD}"])


def _has(repository: Repository, commit: str | None) -> bool:
    try:
        return bool(repository.commit(commit or HEAD))
    except GitError:
        return False


def _reason(stderr: str) -> str:
    """Return the error lines without git's hints."""
    lines = [line.removeprefix("fatal: ").removeprefix("error: ") for line in stderr.splitlines() if line.strip()]
    return "; ".join(line for line in lines if not line.startswith("hint:"))[:500]


def _split(names: str) -> list[str]:
    return [name for name in names.split("\0") if name]


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")
