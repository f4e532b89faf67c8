"""Git repositories: found in many places, read without a checkout, the user's own left alone."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from c2bug_repositories import git

from dockyard.tasks.repository import HEAD, GitError, Repositories, Repository

FILES = {"a.py": "one\ntwo\nthree\n", "tests/test_a.py": "assert True\n", ".gitattributes": "a.py export-ignore\n"}
PATCH = "--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"  # without a last newline


def make(folder: Path, files: dict[str, str] = FILES) -> str:
    """A checkout with one commit; its id."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    return git(folder, "rev-parse", "HEAD").strip()


def opened(tmp_path: Path, address: str, commit: str | None) -> Repository:
    (tmp_path / "work").mkdir(parents=True, exist_ok=True)
    return Repositories(tmp_path / "work").open(address, commit)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    make(tmp_path / "checkout")
    return tmp_path / "checkout"


def test_a_patch_makes_a_tree_and_touches_no_file(tmp_path: Path, checkout: Path):
    repository = opened(tmp_path, str(checkout), "main")
    base = repository.tree(repository.commit("main"))
    patched = repository.apply(base, PATCH)
    assert repository.changed(base, patched) == ["a.py"]
    assert repository.apply(patched, PATCH, reverse=True) == base
    assert repository.apply(base, repository.diff(base, patched)) == patched
    assert git(checkout, "status", "--porcelain") == ""
    assert not (checkout / ".git" / "FETCH_HEAD").exists()


def test_a_patch_that_does_not_apply_says_where(tmp_path: Path, checkout: Path):
    repository = opened(tmp_path, str(checkout), "main")
    with pytest.raises(GitError, match="a.py"):
        repository.apply(repository.tree("main"), PATCH.replace("-two", "-zwei"))
    with pytest.raises(GitError):
        repository.apply(repository.tree("main"), "no patch at all")


def test_files_and_folders_can_be_left_out(tmp_path: Path, checkout: Path):
    repository = opened(tmp_path, str(checkout), "main")
    base = repository.tree("main")
    assert repository.paths(repository.without(base, ["tests", "nowhere"])) == [".gitattributes", "a.py"]
    assert repository.without(base, []) == base


def test_an_archive_holds_every_file_and_is_always_the_same(tmp_path: Path, checkout: Path):
    repository = opened(tmp_path, str(checkout), "main")
    tree = repository.tree("main")
    archive = repository.archive(tree)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        assert {member.name for member in files if member.isfile()} == set(FILES)  # although export-ignore
    assert opened(tmp_path / "other", str(checkout), "main").archive(tree) == archive
    with tarfile.open(fileobj=io.BytesIO(repository.archive(tree, ["tests"]))) as files:
        assert [member.name for member in files if member.isfile()] == ["tests/test_a.py"]
    with tarfile.open(fileobj=io.BytesIO(repository.archive(tree, []))) as files:
        assert files.getnames() == []


def test_line_endings_stay_as_they_are(tmp_path: Path):
    make(tmp_path / "c", {"a.txt": "one\n", ".gitattributes": "*.txt text eol=crlf\n"})
    repository = opened(tmp_path, str(tmp_path / "c"), None)
    with tarfile.open(fileobj=io.BytesIO(repository.archive(repository.tree(HEAD)))) as files:
        member = files.extractfile("a.txt")
        assert member is not None
        assert member.read() == b"one\n"


@pytest.mark.parametrize("place", ["owner/name", "owner__name", "owner-name", "name", "name.git", "owner__name.bundle"])
def test_a_repository_is_found_in_the_folder_of_local_ones(tmp_path: Path, checkout: Path, place: str):
    local = tmp_path / "local"
    (local / place).parent.mkdir(parents=True)
    if place.endswith(".bundle"):
        git(checkout, "bundle", "create", "--quiet", str(local / place), "main")
    else:
        shutil.copytree(checkout / ".git" if place.endswith(".git") else checkout, local / place)
    (tmp_path / "work").mkdir()
    repositories = Repositories(tmp_path / "work", local)
    address = repositories.find("owner/name")
    assert address == str(local / place)
    repository = repositories.open(address, "main")
    assert "a.py" in repository.paths(repository.tree("main"))


def test_a_repository_that_is_not_local_is_on_github(tmp_path: Path):
    assert Repositories(tmp_path, tmp_path).find("owner/name") == "https://github.com/owner/name.git"
    assert Repositories(tmp_path).find("owner/name", "https://example.org/x") == "https://example.org/x"


def test_the_row_may_say_where_it_is(tmp_path: Path, checkout: Path):
    repositories = Repositories(tmp_path, tmp_path)
    assert repositories.find("owner/name", "checkout") == str(checkout)
    assert repositories.find("owner/name", str(checkout)) == str(checkout)
    assert repositories.find(str(checkout)) == str(checkout)


@pytest.mark.parametrize("server_gives_commits", ["true", "false"])
def test_one_commit_is_fetched_from_a_url_or_everything(tmp_path: Path, checkout: Path, server_gives_commits: str):
    first = git(checkout, "rev-parse", "HEAD").strip()
    (checkout / "b.py").write_text("")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "more")
    git(checkout, "config", "uploadpack.allowAnySHA1InWant", server_gives_commits)
    git(checkout, "config", "uploadpack.allowReachableSHA1InWant", server_gives_commits)
    repository = opened(tmp_path, f"file://{checkout}", first)
    assert repository.commit(first) == first
    assert "b.py" not in repository.paths(repository.tree(first))
    assert opened(tmp_path / "head", f"file://{checkout}", None).commit(HEAD) != first


def test_a_bundle_may_hold_nothing_but_head(tmp_path: Path, checkout: Path):
    head = git(checkout, "rev-parse", "HEAD").strip()
    bundle = tmp_path / "x.bundle"
    git(checkout, "bundle", "create", "--quiet", str(bundle), "HEAD")
    assert opened(tmp_path, str(bundle), head).commit(head) == head
    assert opened(tmp_path / "by head", str(bundle), None).commit(HEAD) == head


def test_a_commit_that_no_branch_has_is_readable_where_it_lies(tmp_path: Path, checkout: Path):
    lost = git(checkout, "rev-parse", "HEAD").strip()
    git(checkout, "commit", "--quiet", "--amend", "--message", "another")
    assert opened(tmp_path, str(checkout), lost).commit(lost) == lost


def test_a_repository_that_cannot_be_read_is_named_and_not_tried_again(tmp_path: Path):
    repositories = Repositories(tmp_path)
    address = f"file://{tmp_path}/nowhere"
    with pytest.raises(GitError, match="the repository `file:.*nowhere` cannot be read: "):
        repositories.open(address, "main")
    make(tmp_path / "nowhere")
    with pytest.raises(GitError, match="nowhere` cannot be read"):
        repositories.open(address, "main")


def test_an_address_is_never_an_option_or_a_command(tmp_path: Path):
    for address in ("--upload-pack=touch x", "ext::sh -c 'touch x'"):
        with pytest.raises(GitError):
            Repositories(tmp_path).open(address, "0" * 40)
    assert not Path("x").exists()
    assert not (tmp_path / "x").exists()


def test_settings_of_the_user_do_not_matter(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config").write_text("[apply]\nwhitespace = error-all\n[core]\nautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", os.devnull)
    repository = opened(tmp_path, str(checkout), "main")
    base = repository.tree("main")
    assert repository.apply(base, PATCH.replace("+2", "+2  ")) != base
