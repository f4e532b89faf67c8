"""Traces become attempts: the words are there, the tokens are made from them."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dockyard.convert.conversation import Converted, group_name
from dockyard.convert.guard import guarded
from dockyard.convert.tokens import Tokeniser, skip
from dockyard.convert.traces import Trace, read_traces
from dockyard.rollout.blame import BY_NAME
from dockyard.rollout.job import is_exception, rollout_of_exception
from dockyard.rollout.outcome import Place
from dockyard.types import Blame, Failure, Rollout


def read_traced(path: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    """Each trial that a file of traces tells of."""
    seen: Counter[str] = Counter()
    for trace in read_traces(path):
        group = group_name(trace.task, trace.agent, trace.model)
        found = _found(trace, group, seen[group])
        seen[group] += 1
        if trace.problem:
            yield skip(found, "unreadable", f"{trace.where}: {trace.problem}")
        elif trace.result and found.rollout.reward is None:
            what = "" if found.rollout.failure else ", neither a reward nor an exception"
            yield skip(found, "no_reward", f"`result` is `{trace.result}`{what}")
        else:
            yield guarded(found, partial(tokeniser.give, found))


def _found(trace: Trace, group: str, attempt: int) -> Converted:
    rollout = _rollout(trace, Place(task=trace.task, kind="", attempt=attempt))
    return Converted(
        where=trace.where,
        trial=trace.trial,
        agent=trace.agent,
        model=trace.model,
        rollout=rollout,
        group=group,
        conversations=trace.conversations,
        notes=(*sorted(trace.notes), *_notes(rollout, trace.reward)),
    )


def _notes(rollout: Rollout, told: float | None) -> tuple[str, ...]:
    if rollout.reward is None:
        return () if rollout.failure else ("no_reward",)
    return ("failed_unrewarded",) if told is None else ()


def _rollout(trace: Trace, place: Place) -> Rollout:
    """`result` is a reward, the exception that Harbor recorded instead of one, or our own word for a lost rollout."""
    if trace.result in BY_NAME and trace.reward is None:
        failure = Failure(cause=trace.result, blame=Blame.INFRASTRUCTURE, message="as the traces say")
    elif is_exception(trace.result):
        return rollout_of_exception(place, trace.result, trace.reward)
    else:
        failure = None
    return Rollout(
        task=place.task, kind=place.kind, attempt=place.attempt, segments=(), reward=trace.reward, failure=failure
    )
