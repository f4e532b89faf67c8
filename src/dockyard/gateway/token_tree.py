"""Every id a session's engine was given or sampled, each stored once, and how they become the fewest segments."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile

import numpy as np

from dockyard.types import Finish, FloatArray, IntArray, Segment, Turn


@dataclass(slots=True, eq=False)
class _Span:
    """A run of ids that every sequence through it shares: an edge of the token tree."""

    ids: IntArray
    parent: "_Span | None"
    end: int
    """Ids from the start of the sequence to the end of this run."""
    children: dict[int, "_Span"] = field(default_factory=dict[int, "_Span"])

    def split(self, at: int) -> "_Span":
        """Cut off the first `at` ids as a new parent; whoever points here still points at the same end."""
        assert self.parent is not None
        upper = _Span(self.ids[:at].copy(), self.parent, self.end - len(self.ids) + at)
        self.parent.children[int(self.ids[0])] = upper
        self.ids, self.parent = self.ids[at:].copy(), upper
        upper.children[int(self.ids[0])] = self
        return upper

    def lineage(self) -> "Iterable[_Span]":
        """This run and those before it, last first."""
        span: _Span | None = self
        while span is not None:
            yield span
            span = span.parent

    def path_ids(self, start: int = 0) -> IntArray:
        """The sequence up to the end of this run, without its first `start` ids."""
        spans = takewhile(lambda span: span.end > start, self.lineage())
        ids = np.concatenate([np.empty(0, np.int32), *[span.ids for span in spans][::-1]])
        return ids[len(ids) - (self.end - start) :]


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A recorded turn; its ids live in the token tree, and are put together when somebody asks for them."""

    number: int
    prompt_len: int
    logprobs: FloatArray
    versions: IntArray
    end: _Span
    finish: Finish
    delivered: bool = True
    trusted: bool = True
    """The harness made this call, as far as can be told."""

    @property
    def prompt_ids(self) -> IntArray:
        return self.turn_ids()[0]

    @property
    def sampled_ids(self) -> IntArray:
        return self.end.path_ids(self.prompt_len)

    def turn_ids(self) -> tuple[IntArray, IntArray]:
        """The prompt, and what was sampled on it."""
        ids = self.end.path_ids()
        return ids[: self.prompt_len], ids[self.prompt_len :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stitched:
    """A session's segments."""

    segments: tuple[Segment, ...]
    untrusted: tuple[Segment, ...]
    """From calls that somebody else than the harness made: recorded, not trained."""
    num_undelivered: int
    num_retries: int


class TokenTree:
    """A radix tree of ids."""

    def __init__(self) -> None:
        self._root = _Span(np.empty(0, np.int32), None, 0)
        self.calls: list[RecordedCall] = []

    def record(self, turn: Turn) -> tuple[RecordedCall, int]:
        """Store a finished turn; also how many of its prompt's ids were there already."""
        end, num_shared = self._insert(np.concatenate([turn.prompt_ids, turn.sampled_ids]))
        number, prompt_len = len(self.calls), len(turn.prompt_ids)
        call = RecordedCall(number, prompt_len, turn.logprobs, turn.versions, end, turn.finish)
        self.calls.append(call)
        return call, min(num_shared, call.prompt_len)

    def stitch(self) -> Stitched:
        """One segment per leaf, each sampled token marked in exactly one."""
        segments, num_undelivered, num_retries = _stitch([call for call in self.calls if call.trusted])
        untrusted, *_ = _stitch([call for call in self.calls if not call.trusted])
        return Stitched(
            segments=segments, untrusted=untrusted, num_undelivered=num_undelivered, num_retries=num_retries
        )

    def _insert(self, ids: IntArray) -> tuple[_Span, int]:
        """The run a sequence ends with, and how many of its ids were there already."""
        span, at = self._root, 0
        while at < len(ids):
            child = span.children.get(int(ids[at]))
            if child is None:
                child = span.children[int(ids[at])] = _Span(ids[at:].astype(np.int32), span, len(ids))
                return child, at
            num_common = _num_common(child.ids, ids[at:])
            span = child if num_common == len(child.ids) else child.split(num_common)
            at += num_common
        return span, len(ids)


def _stitch(recorded: list[RecordedCall]) -> tuple[tuple[Segment, ...], int, int]:
    calls = [call for call in recorded if len(call.logprobs)]
    parents = _parents(calls)
    extended = {parent.number for parent in parents.values()}
    arrived = [call for call in calls if call.delivered or call.number in extended]
    kept = _without_retries(arrived, extended)
    inner = {parents[call.number].number for call in kept if call.number in parents}
    owned: set[int] = set()
    segments = tuple(_segment(call, parents, owned) for call in kept if call.number not in inner)
    return segments, len(calls) - len(arrived), len(arrived) - len(kept)


def _num_common(left: IntArray, right: IntArray) -> int:
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def _parents(calls: list[RecordedCall]) -> dict[int, RecordedCall]:
    """For each call the one with the longest prompt and completion that its prompt starts with."""
    ending: dict[int, RecordedCall] = {id(call.end): call for call in calls}  # twins: the last one
    parents: dict[int, RecordedCall] = {}
    for call in calls:
        before = (span for span in call.end.lineage() if span.end <= call.prompt_len)
        parent = next((ending[id(span)] for span in before if id(span) in ending), None)
        if parent:
            parents[call.number] = parent
    return parents


def _without_retries(calls: list[RecordedCall], extended: set[int]) -> list[RecordedCall]:
    """Of several samples from the very same prompt keep those the agent went on with, else the last."""
    prompts = {call.number: _prompt_key(call) for call in calls}
    continued = {prompt for number, prompt in prompts.items() if number in extended}
    last = {prompt: number for number, prompt in prompts.items()}
    chosen = extended | {number for prompt, number in last.items() if prompt not in continued}
    return [call for call in calls if call.number in chosen]


def _prompt_key(call: RecordedCall) -> tuple[int, bytes]:
    return call.prompt_len, sha256(call.turn_ids()[0].tobytes()).digest()


def _segment(leaf: RecordedCall, parents: dict[int, RecordedCall], owned: set[int]) -> Segment:
    """The leaf's whole sequence. Turns in `owned` are context here: an earlier segment trains them."""
    token_ids = leaf.end.path_ids()
    sampled = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), -1, np.int32)
    call: RecordedCall | None = leaf
    while call:
        if call.number not in owned:
            drawn = slice(call.prompt_len, call.end.end)
            sampled[drawn], logprobs[drawn], versions[drawn] = True, call.logprobs, call.versions
            owned.add(call.number)
        call = parents.get(call.number)
    return Segment(token_ids=token_ids, sampled=sampled, logprobs=logprobs, versions=versions)
