"""Traces become attempts: the words are there, the tokens are made from them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dockyard.convert.conversation import Converted
from dockyard.convert.tokens import Tokeniser, skip
from dockyard.convert.traces import Trace, read_traces
from dockyard.rollout.blame import BY_NAME
from dockyard.rollout.job import rollout_of_exception
from dockyard.rollout.outcome import Place
from dockyard.types import Blame, Failure, Rollout


def read_traced(path: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    """Each trial that a file of traces tells of."""
    seen: Counter[str] = Counter()
    for trace in read_traces(path):
        found = _found(trace, seen[trace.task])
        seen[trace.task] += 1
        if trace.problem:
            yield skip(found, "unreadable", f"{trace.where}: {trace.problem}")
        elif found.rollout.failure and found.rollout.reward is None:
            yield skip(found, "no_reward", f"`result` is `{trace.result}`")
        else:
            yield tokeniser.give(found)


def _found(trace: Trace, attempt: int) -> Converted:
    found = Converted(
        where=trace.where,
        trial=trace.trial,
        agent=trace.agent,
        model=trace.model,
        rollout=_rollout(trace, Place(task=trace.task, kind="", attempt=attempt)),
        conversations=trace.conversations,
        notes=tuple(sorted(trace.notes)),
    )
    unknown = found.rollout.reward is None and found.rollout.failure is None
    return replace(found, notes=(*found.notes, "no_reward")) if unknown else found


def _rollout(trace: Trace, place: Place) -> Rollout:
    """`result` is a reward, the exception that Harbor recorded instead of one, or our own word for a lost rollout."""
    if trace.result in BY_NAME and trace.reward is None:
        failure = Failure(cause=trace.result, blame=Blame.INFRASTRUCTURE, message="as the traces say")
    elif trace.result.isidentifier():
        return rollout_of_exception(place, trace.result, trace.reward)
    else:
        failure = None
    return Rollout(
        task=place.task, kind=place.kind, attempt=place.attempt, segments=(), reward=trace.reward, failure=failure
    )
