"""Reads recorded rollouts to train on: jobs, runs and trajectories are converted, samples are used as they are."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dockyard.convert.read import Converted, read_trials
from dockyard.convert.samples import Sample, groups_of, read_samples
from dockyard.convert.tokenize import tokenizer_mismatch
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import Group, Rollout, Segment

logger = logging.getLogger(__name__)

_MAX_LINE = 64 * 2**20


def read_groups(path: Path, renderer: Renderer) -> tuple[Group, ...]:
    """The rollouts that can be trained on, in groups by task; those of a Dockyard run also by step."""
    if holds_samples(path):
        return groups_of(_checked(path, renderer))
    by_group: dict[str, list[Rollout]] = {}
    for converted in _convertible(path, renderer):
        by_group.setdefault(converted.group or converted.rollout.task, []).append(converted.rollout)
    return tuple(Group(task=rollouts[0].task, rollouts=tuple(rollouts)) for rollouts in by_group.values())


def holds_samples(path: Path) -> bool:
    """Whether a file has samples that `dockyard convert` or SLiME wrote, by its suffix or its content."""
    if not path.is_file():
        return False
    if path.suffix == ".parquet":
        return _has_tokens(path)
    if path.suffix in (".json", ".jsonl"):
        with path.open("rb") as file:
            first = file.readline(_MAX_LINE) if path.suffix == ".jsonl" else file.read(64).lstrip()
        return b'"tokens"' in first if path.suffix == ".jsonl" else first.startswith(b"[")
    return path.suffix == ".pt"


def _has_tokens(path: Path) -> bool:
    import pyarrow.parquet as parquet  # pyright: ignore[reportMissingTypeStubs]

    try:
        return "tokens" in parquet.read_schema(path).names  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError):
        return True  # reading it reports what is wrong


def _checked(path: Path, renderer: Renderer) -> Iterator[Sample]:
    """Read samples, and refuse ids of another tokenizer: they would be trained on without an error, or crash later."""
    for sample in read_samples(path):
        nothing = np.zeros(len(sample.tokens), np.bool_)
        segment = Segment(token_ids=sample.tokens, sampled=nothing, logprobs=None, versions=None)
        why = tokenizer_mismatch([segment], f"{sample.prompt}\n{sample.response}", renderer)
        if why:
            hint = "set `--model.name` to the model that the samples were made for"
            raise DockyardError(f"sample {sample.index} of `{path}` was made for another model: {why}", hint=hint)
        yield sample


def _convertible(path: Path, renderer: Renderer) -> Iterator[Converted]:
    """The attempts that can be trained on. Others are logged, and counted at the end."""
    left_out: Counter[str] = Counter()
    num_read = 0
    for converted in read_trials(path, renderer):
        num_read += 1
        if converted.skipped:
            left_out[converted.skipped] += 1
            logger.warning("%s: %s%s", converted.where, converted.skipped, converted.detail and f": {converted.detail}")
        else:
            yield converted
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(left_out.items())) or "none"
    logger.info("%d rollouts in %s, left out: %s", num_read, path, reasons)
