"""What a session's calls have in common, as pure data: a tree of messages to recognise a returning history by,
and a tree of token ids that becomes the fewest segments.

The two trees are apart on purpose. An agent may echo a turn with other whitespace and it is still that turn; for
training only equal ids count.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256

import numpy as np

from dockyard.types import FloatArray, IntArray, Segment, Turn

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a history, the same whatever dialect the agent speaks."""

    role: str
    text: str


class Branch(StrEnum):
    """Why a call does not simply continue the turn before it."""

    ROOT = "root"
    """Another opening: a side call, a subagent, a compacted history."""
    EDITED = "edited"
    """The agent changed the text of a sampled turn."""
    DROPPED = "dropped"
    """The agent left a sampled turn out."""
    FOREIGN = "foreign"
    """An assistant message that nobody sampled."""
    REWRITTEN = "rewritten"
    """Some other message changed."""
    FORK = "fork"
    """A second continuation of a turn that already has one."""
    RETRY = "retry"
    """The same history again."""
    UNSAFE = "unsafe"
    """The chat template does not let new messages be rendered on their own."""


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

    def path_ids(self) -> IntArray:
        return np.concatenate([span.ids for span in self.lineage()][::-1])


@dataclass(slots=True, eq=False)
class _Call:
    """A recorded turn; its ids live in the token tree."""

    number: int
    end: _Span
    prompt_len: int
    logprobs: FloatArray
    versions: IntArray
    delivered: bool = True


@dataclass(slots=True, eq=False)
class _Node:
    """A message in the tree of histories; `call` if the policy sampled it."""

    message: Message | None
    call: _Call | None = None
    children: "list[_Node]" = field(default_factory=list["_Node"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to build the prompt of a call: keep `prefix` as sampled and append `new`, or render everything."""

    prefix: IntArray | None
    """The exact ids up to the end of the last sampled turn the agent still has; None when there is none."""
    new: tuple[Message, ...]
    """The messages after that turn."""
    branch: Branch | None
    node: _Node
    """Where `new` hangs in the tree of histories."""

    def without_splice(self) -> "Plan":
        """The same call when `new` cannot be rendered on its own."""
        return replace(self, prefix=None, branch=Branch.UNSAFE)


class Forest:
    """Everything one session said and sampled."""

    def __init__(self) -> None:
        self._messages = _Node(None)
        self._tokens = _Span(np.empty(0, np.int32), None, 0)
        self._calls: list[_Call] = []
        self._stats = Counter(prompt_tokens=0, sampled_tokens=0, splices=0, reencoded_tokens=0)

    def plan(self, messages: Sequence[Message]) -> Plan:
        """Find the deepest sampled turn whose whole history is a prefix of `messages`."""
        level, base, num_base = [self._messages], self._messages, 0
        num_matched = 0
        for message in messages:
            below = [child for node in level for child in node.children if _same(child.message, message)]
            if not below:
                break
            level, num_matched = below, num_matched + 1
            sampled = [node for node in level if node.call]
            if sampled:  # twins: the agent most likely holds the one it was given last
                base, num_base = max(sampled, key=_commit_order), num_matched
        return Plan(
            prefix=base.call.end.path_ids() if base.call else None,
            new=tuple(messages[num_base:]),
            branch=_branch(level, messages[num_matched:], at_root=num_matched == 0) if self._calls else None,
            node=base,
        )

    def commit(self, plan: Plan, turn: Turn, text: str) -> int:
        """Record a finished call; returns its number."""
        end, num_shared = self._insert(np.concatenate([turn.prompt_ids, turn.sampled_ids]))
        call = _Call(len(self._calls), end, len(turn.prompt_ids), turn.logprobs, turn.versions)
        self._count(plan, turn, min(num_shared, call.prompt_len))
        node = plan.node
        for message in plan.new:
            node = _context_child(node, message)
        node.children.append(_Node(Message(ASSISTANT, text), call))
        self._calls.append(call)
        return call.number

    def mark_undelivered(self, number: int) -> None:
        """The agent hung up before it had this turn. It is trained only if a later call shows that it arrived."""
        self._calls[number].delivered = False

    def stitch(self) -> tuple[tuple[Segment, ...], dict[str, int]]:
        """One segment per leaf of the token tree, each sampled token marked in exactly one; and the counts."""
        calls = [call for call in self._calls if len(call.logprobs)]
        parents = _parents(calls)
        extended = {parent.number for parent in parents.values()}
        leaves = [call for call in calls if call.number not in extended]
        delivered = [leaf for leaf in leaves if leaf.delivered]
        kept = _without_retries(delivered, [call for call in calls if call.number in extended])
        lost = {"undelivered": len(leaves) - len(delivered), "dropped_retries": len(delivered) - len(kept)}
        owned: set[int] = set()
        segments = tuple(_segment(leaf, parents, owned) for leaf in kept)
        return segments, dict(self._stats) | lost

    def _insert(self, ids: IntArray) -> tuple[_Span, int]:
        """Add a sequence to the token tree: the run it ends with, and how many of its ids were there already."""
        span, at = self._tokens, 0
        while at < len(ids):
            child = span.children.get(int(ids[at]))
            if child is None:
                child = span.children[int(ids[at])] = _Span(ids[at:].astype(np.int32), span, len(ids))
                return child, at
            num_common = _num_common(child.ids, ids[at:])
            span = child if num_common == len(child.ids) else child.split(num_common)
            at += num_common
        return span, len(ids)

    def _count(self, plan: Plan, turn: Turn, num_shared: int) -> None:
        self._stats["prompt_tokens"] += len(turn.prompt_ids)
        self._stats["sampled_tokens"] += len(turn.sampled_ids)
        if plan.prefix is not None:
            self._stats["splices"] += 1
        elif self._calls:
            self._stats["reencoded_tokens"] += len(turn.prompt_ids) - num_shared
        if plan.branch:
            self._stats[f"branch_{plan.branch}"] += 1


def _same(recorded: Message | None, sent: Message) -> bool:
    """Is the message the agent sent the one recorded? Agents trim and re-wrap what the model said, nothing else."""
    if recorded is None or recorded.role != sent.role:
        return False
    if sent.role == ASSISTANT:
        return recorded.text.split() == sent.text.split()
    return recorded.text == sent.text


def _commit_order(node: _Node) -> int:
    assert node.call is not None
    return node.call.number


def _context_child(node: _Node, message: Message) -> _Node:
    """The child for a message that was not sampled here, made if it is new."""
    for child in node.children:
        if child.call is None and _same(child.message, message):
            return child
    child = _Node(message)
    node.children.append(child)
    return child


def _branch(level: list[_Node], rest: Sequence[Message], *, at_root: bool) -> Branch | None:
    """Name what the agent did where the walk stopped: `level` matched, the first of `rest` did not."""
    below = [child for node in level for child in node.children]
    resampled = any(child.call for child in below)
    if not rest:
        return Branch.RETRY if resampled else Branch.REWRITTEN if below else None
    if at_root:
        return Branch.ROOT
    if rest[0].role == ASSISTANT:
        return Branch.EDITED if resampled else Branch.FOREIGN
    if resampled:
        return Branch.DROPPED
    if below:
        return Branch.FORK if any(node.call for node in level) else Branch.REWRITTEN
    return Branch.FOREIGN if any(message.role == ASSISTANT for message in rest) else None


def _num_common(left: IntArray, right: IntArray) -> int:
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def _parents(calls: list[_Call]) -> dict[int, _Call]:
    """For each call the one with the longest prompt and completion that its prompt starts with."""
    ending: dict[int, _Call] = {id(call.end): call for call in calls}  # twins: the last one
    parents: dict[int, _Call] = {}
    for call in calls:
        before = (span for span in call.end.lineage() if span.end <= call.prompt_len)
        parent = next((ending[id(span)] for span in before if id(span) in ending), None)
        if parent:
            parents[call.number] = parent
    return parents


def _without_retries(leaves: list[_Call], extended: list[_Call]) -> list[_Call]:
    """Of several samples from the very same prompt keep the one the agent went on with, else the last."""
    chosen = {_prompt_key(leaf): leaf for leaf in leaves}
    continued = {_prompt_key(call) for call in extended}
    return [leaf for leaf in leaves if chosen[_prompt_key(leaf)] is leaf and _prompt_key(leaf) not in continued]


def _prompt_key(call: _Call) -> tuple[int, bytes]:
    return call.prompt_len, sha256(call.end.path_ids()[: call.prompt_len].tobytes()).digest()


def _segment(leaf: _Call, parents: dict[int, _Call], owned: set[int]) -> Segment:
    """The leaf's whole sequence. Turns in `owned` are context here: an earlier segment trains them."""
    token_ids = leaf.end.path_ids()
    sampled = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), -1, np.int32)
    call: _Call | None = leaf
    while call:
        if call.number not in owned:
            drawn = slice(call.prompt_len, call.end.end)
            sampled[drawn], logprobs[drawn], versions[drawn] = True, call.logprobs, call.versions
            owned.add(call.number)
        call = parents.get(call.number)
    return Segment(token_ids=token_ids, sampled=sampled, logprobs=logprobs, versions=versions)
