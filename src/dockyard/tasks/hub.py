"""A dataset of the Hugging Face Hub, from the network or from the cache that an earlier fetch left behind."""

import logging
from collections.abc import Sequence
from pathlib import Path

from dockyard.errors import DockyardError, UsageError

logger = logging.getLogger(__name__)


def find_dataset(name: str, suffixes: Sequence[str]) -> Path:
    """The folder with the dataset's files of these kinds."""
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(tuple(suffixes)):
        hint = "name a file, a folder of such files, or a dataset of the Hub as `owner/name`"
        raise UsageError(f"there is no dataset `{name}`", hint=hint)
    logger.info("looking for the dataset %s on the Hub", name)
    return _fetched(name, [f"*{suffix}" for suffix in suffixes])


def _fetched(name: str, patterns: list[str]) -> Path:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    reach = "check the network, or give a local file of the dataset"
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except HFValidationError:
        message, hint = f"`{name}` is neither here nor a name of the Hub", "check the dataset's name or path"
    except GatedRepoError:
        message, hint = f"the dataset `{name}` needs its terms accepted", "accept them on the Hub, then `hf auth login`"
    except RepositoryNotFoundError:
        message, hint = f"there is no dataset `{name}` here or on the Hub", "check the name, or `hf auth login`"
    except (OSError, HTTPError) as error:  # the Hub's own errors are OSErrors
        if cached := _cached(name, patterns):
            return cached
        reason = (str(error).splitlines() or ["no reason given"])[0]
        message, hint = f"the dataset `{name}` is not here and the Hub cannot be reached: {reason}", reach
    raise DockyardError(message, hint=hint)


def _cached(name: str, patterns: list[str]) -> Path | None:
    """Behind a proxy that refuses, the Hub's client does not look there by itself."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
