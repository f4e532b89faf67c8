"""Claim a folder for a new run, and delete a run."""

import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from dockyard.errors import UsageError
from dockyard.run_dir.durable import make_folder
from dockyard.run_dir.paths import RunPaths
from dockyard.run_dir.resume import take_lock

logger = logging.getLogger(__name__)


def claim_folder(paths: RunPaths, *, overwrite: bool) -> int:
    """Make and lock a folder for a new run, and return the lock. `overwrite` deletes a run that is already there."""
    if paths.root.exists() and not paths.root.is_dir():
        raise UsageError(f"`{paths.root}` is a file, not a folder", hint="choose another `--run_dir`")
    make_folder(paths.root, hint="choose another `--run_dir`")
    _refuse_foreign_files(paths)
    lock = take_lock(paths.lock)
    if not paths.config.exists():
        return lock
    if not overwrite:
        os.close(lock)
        hint = f"`--resume {paths.root}` continues it, `--run_dir DIR` begins another, `--overwrite` deletes it first"
        raise UsageError(f"`{paths.root}` already holds a run", hint=hint)
    logger.warning("deleting the run in %s", paths.root)
    delete_run(paths)
    return lock


def _refuse_foreign_files(paths: RunPaths) -> None:
    """Only a folder with our lock file is a run: never delete `tasks` or `config.toml` of another program."""
    found = [path.name for path in paths.contents if path.exists()]
    if found and not paths.lock.exists():
        names = ", ".join(f"`{name}`" for name in found)
        raise UsageError(f"`{paths.root}` is not a run, but holds {names}", hint="choose another `--run_dir`")


def delete_run(paths: RunPaths, *, keep: Collection[Path] = ()) -> None:
    """Delete everything that belongs to the run except its lock file."""
    for path in paths.contents:
        if path in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
