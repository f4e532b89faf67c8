"""A radix tree of the token ids that an engine was given or sampled, and how recorded turns become the fewest segments.

Each id is stored once, however many prompts repeat it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile

import numpy as np

from dockyard.types import Finish, FloatArray, IntArray, Segment, Turn, common_prefix


@dataclass(slots=True, eq=False)
class _Span:
    """An edge of the tree: a run of ids that every sequence through it shares."""

    ids: IntArray
    parent: "_Span | None"
    end: int
    """The number of ids from the start of the sequence to the end of this run."""
    children: dict[int, "_Span"] = field(default_factory=dict[int, "_Span"])

    def split(self, at: int) -> "_Span":
        """Move the first `at` ids to a new parent. References to this span keep pointing at the same end."""
        assert self.parent is not None
        upper = _Span(self.ids[:at].copy(), self.parent, self.end - len(self.ids) + at)
        self.parent.children[int(self.ids[0])] = upper
        self.ids, self.parent = self.ids[at:].copy(), upper
        upper.children[int(self.ids[0])] = self
        return upper

    def lineage(self) -> "Iterable[_Span]":
        """This span and its ancestors, up to the root."""
        span: _Span | None = self
        while span is not None:
            yield span
            span = span.parent

    def path_ids(self, start: int = 0) -> IntArray:
        """The sequence up to the end of this span, without its first `start` ids."""
        spans = takewhile(lambda span: span.end > start, self.lineage())
        ids = np.concatenate([np.empty(0, np.int32), *[span.ids for span in spans][::-1]])
        return ids[len(ids) - (self.end - start) :]


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A recorded turn. Its ids are stored in the tree, and assembled on access."""

    number: int
    prompt_len: int
    logprobs: FloatArray | None
    versions: IntArray | None
    end: _Span
    finish: Finish
    delivered: bool = True
    trusted: bool = True
    """Whether the agent's harness made this call, as far as the gateway can tell."""

    @property
    def prompt_ids(self) -> IntArray:
        return self.turn_ids()[0]

    @property
    def sampled_ids(self) -> IntArray:
        return self.end.path_ids(self.prompt_len)

    @property
    def num_sampled(self) -> int:
        return self.end.end - self.prompt_len

    def turn_ids(self) -> tuple[IntArray, IntArray]:
        """The prompt ids and the sampled ids."""
        ids = self.end.path_ids()
        return ids[: self.prompt_len], ids[self.prompt_len :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stitched:
    """The segments of a session."""

    segments: tuple[Segment, ...]
    untrusted: tuple[Segment, ...]
    """Segments of calls that the agent's harness did not make. They are recorded, but not trained on."""
    num_undelivered: int
    num_retries: int


class TokenTree:
    """The recorded turns of one session, in a radix tree of their ids."""

    def __init__(self) -> None:
        self._root = _Span(np.empty(0, np.int32), None, 0)
        self.calls: list[RecordedCall] = []

    def record(self, turn: Turn) -> tuple[RecordedCall, int]:
        """Store a finished turn. Also returns how many of its prompt ids were already stored."""
        end, num_shared = self._insert(np.concatenate([turn.prompt_ids, turn.sampled_ids]))
        number, prompt_len = len(self.calls), len(turn.prompt_ids)
        call = RecordedCall(number, prompt_len, turn.logprobs, turn.versions, end, turn.finish)
        self.calls.append(call)
        return call, min(num_shared, call.prompt_len)

    def stitch(self) -> Stitched:
        """Return one segment per leaf. Each sampled token is marked in exactly one segment."""
        segments, num_undelivered, num_retries = _stitch([call for call in self.calls if call.trusted])
        untrusted, *_ = _stitch([call for call in self.calls if not call.trusted])
        return Stitched(
            segments=segments, untrusted=untrusted, num_undelivered=num_undelivered, num_retries=num_retries
        )

    def _insert(self, ids: IntArray) -> tuple[_Span, int]:
        """Return the span that the sequence ends with, and how many of its ids were already stored."""
        span, at = self._root, 0
        while at < len(ids):
            child = span.children.get(int(ids[at]))
            if child is None:
                child = span.children[int(ids[at])] = _Span(ids[at:].astype(np.int32), span, len(ids))
                return child, at
            num_common = common_prefix(child.ids, ids[at:])
            span = child if num_common == len(child.ids) else child.split(num_common)
            at += num_common
        return span, len(ids)


def stitch_turns(turns: Iterable[Turn]) -> tuple[Segment, ...]:
    """Join turns whose prompts continue one another into segments, by the rules that a session's turns follow.

    A prompt may continue any earlier turn. Of several turns with the same prompt, those that a later prompt continues
    are kept, or else the last one.
    """
    tree = TokenTree()
    for turn in turns:
        tree.record(turn)
    return tree.stitch().segments


def _stitch(recorded: list[RecordedCall]) -> tuple[tuple[Segment, ...], int, int]:
    calls = [call for call in recorded if call.num_sampled]
    parents = _parents(calls)
    extended = {parent.number for parent in parents.values()}
    arrived = [call for call in calls if call.delivered or call.number in extended]
    kept = _without_retries(arrived, extended)
    inner = {parents[call.number].number for call in kept if call.number in parents}
    owned: set[int] = set()
    segments = tuple(_segment(call, parents, owned) for call in kept if call.number not in inner)
    return segments, len(calls) - len(arrived), len(arrived) - len(kept)


def _parents(calls: list[RecordedCall]) -> dict[int, RecordedCall]:
    """Map each call to the longest turn (prompt and sampled ids) that its prompt starts with."""
    ending: dict[int, RecordedCall] = {id(call.end): call for call in calls}  # of equal turns, the last one
    parents: dict[int, RecordedCall] = {}
    for call in calls:
        before = (span for span in call.end.lineage() if span.end <= call.prompt_len)
        parent = next((ending[id(span)] for span in before if id(span) in ending), None)
        if parent:
            parents[call.number] = parent
    return parents


def _without_retries(calls: list[RecordedCall], extended: set[int]) -> list[RecordedCall]:
    """Of several samples from the same prompt, keep those that the agent continued, or else the last one."""
    prompts = {call.number: _prompt_key(call) for call in calls}
    continued = {prompt for number, prompt in prompts.items() if number in extended}
    last = {prompt: number for number, prompt in prompts.items()}
    chosen = extended | {number for prompt, number in last.items() if prompt not in continued}
    return [call for call in calls if call.number in chosen]


def _prompt_key(call: RecordedCall) -> tuple[int, bytes]:
    return call.prompt_len, sha256(call.turn_ids()[0].tobytes()).digest()


def _segment(leaf: RecordedCall, parents: dict[int, RecordedCall], owned: set[int]) -> Segment:
    """The whole sequence of a leaf. Turns in `owned` are marked in an earlier segment, and are context here."""
    turns = _own_turns(leaf, parents, owned)
    token_ids = leaf.end.path_ids()
    sampled = np.zeros(len(token_ids), np.bool_)
    for turn in turns:
        sampled[turn.prompt_len : turn.end.end] = True
    logprobs: FloatArray | None = np.zeros(len(token_ids), np.float32)
    versions: IntArray | None = np.full(len(token_ids), -1, np.int32)
    for turn in turns:
        drawn = slice(turn.prompt_len, turn.end.end)
        logprobs = _filled(logprobs, drawn, turn.logprobs)
        versions = _filled(versions, drawn, turn.versions)
    return Segment(token_ids=token_ids, sampled=sampled, logprobs=logprobs, versions=versions)


def _own_turns(leaf: RecordedCall, parents: dict[int, RecordedCall], owned: set[int]) -> list[RecordedCall]:
    """The turns of a leaf's sequence that no earlier segment has marked. They are added to `owned`."""
    turns: list[RecordedCall] = []
    call: RecordedCall | None = leaf
    while call:
        if call.number not in owned:
            turns.append(call)
            owned.add(call.number)
        call = parents.get(call.number)
    return turns


def _filled[T: (IntArray, FloatArray)](values: T | None, drawn: slice, recorded: T | None) -> T | None:
    """Set a turn's values in place. None if this turn or an earlier one has none: a segment has all or none."""
    if values is None or recorded is None:
        return None
    values[drawn] = recorded
    return values
