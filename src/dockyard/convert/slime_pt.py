"""SLiME's debug file, from which `--load-debug-rollout-data` trains without an engine. Only this module needs torch.

SLiME checks the first sample for log-probabilities, and then reads those of all samples. A file therefore has them for
every sample or for none.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dockyard.convert.samples import Sample
from dockyard.errors import DockyardError

logger = logging.getLogger(__name__)


@contextmanager
def write_slime(path: Path) -> Generator[Callable[[Sample], None]]:
    """Collect the samples of one file, and write it at the end."""
    torch = _torch()  # fail now, not after hours of conversion
    samples: list[Sample] = []
    yield samples.append
    torch.save({"rollout_id": 0, "samples": slime_rows(samples)}, path)


def slime_rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The samples in the form that SLiME's `Sample.from_dict` reads. Needs no torch."""
    rows = [_slime_row(sample) for sample in samples]
    trained = [row for row in rows if any(row["loss_mask"])]
    recorded = [row for row in trained if row["rollout_log_probs"] is not None]
    if len(recorded) < len(trained):
        if recorded:
            missing = len(trained) - len(recorded)
            logger.warning("%d of %d samples have no log-probabilities: none are written", missing, len(trained))
        return [row | {"rollout_log_probs": None} for row in rows]
    zeros = ([0.0] * row["response_length"] for row in rows)  # for a dropped rollout
    return [
        row | {"rollout_log_probs": row["rollout_log_probs"] or zero} for row, zero in zip(rows, zeros, strict=True)
    ]


def load_slime(path: Path) -> list[Any]:
    """Read the samples of a file that SLiME or Dockyard wrote."""
    try:
        content = _torch().load(path, weights_only=True, map_location="cpu")
        return list(content["samples"])
    except DockyardError:
        raise
    except Exception as error:  # torch raises many kinds of errors for other files
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        hint = "SLiME writes one with `--save-debug-rollout-data`, `dockyard convert` with `--output FILE.pt`"
        raise DockyardError(f"`{path}` is not a SLiME file with samples: {reason}", hint=hint) from error


def _slime_row(sample: Sample) -> dict[str, Any]:
    """The fields that both SLiME and Miles have."""
    row = sample.row()
    versions: list[int] | None = row.pop("versions")
    row["reward"] = 0.0 if sample.reward is None else sample.reward  # and `remove_sample` is set
    row["weight_versions"] = _calls(versions or [])
    return row


def _calls(versions: list[int]) -> list[str]:
    """The weight version of each run of sampled tokens."""
    changes = np.flatnonzero(np.diff(np.array(versions, np.int32), prepend=-1))
    return [str(versions[place]) for place in changes if versions[place] >= 0]


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DockyardError(
            "SLiME's `.pt` files need torch, which is not installed",
            hint="`pip install 'dockyard[train]'`, or give the output the suffix `.parquet`",
        ) from error
    return torch
