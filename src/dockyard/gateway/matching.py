"""Recognises the histories that agents send back, with a tree of messages and one rule of when two are the same.

The tree of messages is separate from the tree of ids on purpose. An agent may send a turn back with other whitespace,
with reordered arguments or without its reasoning, and it is still that turn. For training only equal ids count.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

from dockyard.gateway.origin import CallOrigins
from dockyard.gateway.token_tree import RecordedCall, Stitched, TokenTree
from dockyard.types import ASSISTANT, Finish, IntArray, Json, Message, Prompt, ToolCall, Turn


class Branch(StrEnum):
    """Why a call does not continue the turn before it."""

    ROOT = "root"
    """The history begins differently: a side call, a subagent, a compacted history."""
    TOOLS = "tools"
    """The history begins the same, with other tools."""
    EDITED = "edited"
    """The agent changed a sampled turn."""
    DROPPED = "dropped"
    """The agent left a sampled turn out."""
    MOVED = "moved"
    """A sampled turn is part of another history, for example after compaction. It is context there."""
    FOREIGN = "foreign"
    """There is an assistant message that the policy did not sample."""
    REWRITTEN = "rewritten"
    """Another message changed."""
    FORK = "fork"
    """A second continuation of a turn that already has one."""
    RETRY = "retry"
    """The same history again."""
    UNSAFE = "unsafe"
    """The chat template cannot render the new messages on their own."""


type _Key = tuple[object, ...]
type ToolDefaults = Mapping[str, Json]
"""By tool name, the default arguments of its schema. claude-code adds them to the calls that it sends back."""


@dataclass(slots=True, eq=False)
class _Node:
    """A message in a history tree. `call` is set if the policy sampled it."""

    message: Message | None
    call: RecordedCall | None = None
    children: dict[_Key, "list[_Node]"] = field(default_factory=dict[_Key, "list[_Node]"])

    def add(self, child: "_Node") -> None:
        assert child.message is not None
        self.children.setdefault(_key(child.message), []).append(child)

    def matching(self, message: Message, defaults: ToolDefaults) -> "list[_Node]":
        candidates = self.children.get(_key(message), ())
        return [child for child in candidates if _same_content(child.message, message, defaults)]

    def all_children(self) -> "list[_Node]":
        return [child for twins in self.children.values() for child in twins]


@dataclass(slots=True, eq=False)
class _HistoryTree:
    """The histories with one set of tools."""

    tools: tuple[Json, ...]
    root: _Node
    defaults: ToolDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """How to build the prompt of a call: keep `prefix` as it was sampled and append `new`, or render everything."""

    prompt: Prompt
    prefix: tuple[IntArray, IntArray] | None
    """Prompt and sampled ids of the last sampled turn that the agent's history still has; None if there is none."""
    calls: tuple[ToolCall, ...]
    """The tool calls of that turn."""
    new: tuple[Message, ...]
    """The messages after it."""
    branch: Branch | None
    node: _Node | None
    """The sampled turn that `new` follows in the history tree; None for the root."""

    def without_splice(self) -> "PromptPlan":
        """The same plan for a template that cannot render `new` on its own."""
        return replace(self, prefix=None, branch=self.branch or Branch.UNSAFE)


class SessionHistory:
    """Everything that one session was sent and sampled: history trees, the token tree, and who made each call."""

    def __init__(self) -> None:
        self._trees: list[_HistoryTree] = []
        self._tokens = TokenTree()
        self._sampled_call_ids: set[str] = set()
        """Ids of the tool calls that the policy made."""
        self._origins = CallOrigins()
        self.num_held = 0
        """Stored ids, those that histories share counted once, with an allowance for each call."""
        self.num_bytes = 0
        """Size of the stored messages."""
        self._stats = Counter(prompt_tokens=0, sampled_tokens=0, splices=0, reencoded_tokens=0)

    def plan(self, prompt: Prompt) -> PromptPlan:
        """Find the deepest sampled turn whose whole history is a prefix of the prompt. Changes nothing."""
        messages = prompt.messages
        tree = self._find_tree(prompt.tools)
        level, base, num_base = [tree.root], None, 0
        num_matched = 0
        for message in messages:
            below = [child for node in level for child in node.matching(message, tree.defaults)]
            if not below:
                break
            level, num_matched = below, num_matched + 1
            sampled = [node for node in level if node.call]
            if sampled:  # of equal turns, the agent most likely has the one it received last
                base, num_base = max(sampled, key=_commit_order), num_matched
        rest = messages[num_matched:]
        return PromptPlan(
            prompt=prompt,
            prefix=base.call.turn_ids() if base and base.call else None,
            calls=base.message.calls if base and base.message else (),
            new=messages[num_base:],
            branch=self._branch(tree, level, rest, messages[0]) if self._tokens.calls else None,
            node=base,
        )

    def commit(self, plan: PromptPlan, turn: Turn, message: Message) -> RecordedCall:
        """Record a finished call."""
        is_first = not self._tokens.calls
        # Not the plan's branch: another call may have finished since.
        branch = plan.branch if plan.branch is Branch.UNSAFE else self.plan(plan.prompt).branch
        call, num_shared = self._tokens.record(turn)
        self.num_held += call.prompt_len - num_shared + len(turn.sampled_ids) + _IDS_PER_CALL
        self._count(plan, branch, turn, 0 if is_first else call.prompt_len - num_shared)
        tree = self._find_tree(plan.prompt.tools)
        if tree not in self._trees:
            self._trees.append(tree)
        node = plan.node or tree.root
        for new in plan.new:
            node = self._context_child(node, new, tree.defaults)
        node.add(_Node(message, call))
        self.num_bytes += _size(message)
        self._sampled_call_ids.update(made.id for made in message.calls)
        self._origins.add(plan.prompt, tree.tools, message)
        return call

    def mark_delivered(self, number: int, delivered: bool) -> None:
        """Record whether the agent received this turn. If not, it is trained only if a later call continues it."""
        self._tokens.calls[number].delivered = delivered

    def stitch(self) -> tuple[Stitched, dict[str, int]]:
        """Return the segments and the statistics."""
        for call, trusted in zip(self._tokens.calls, self._origins.trusted(), strict=True):
            call.trusted = trusted
        stitched = self._tokens.stitch()
        trusted_calls = [call for call in self._tokens.calls if call.trusted]
        trained = sum(int(segment.sampled.sum()) for segment in stitched.segments)
        counts = {
            "undelivered": stitched.num_undelivered,
            "dropped_retries": stitched.num_retries,
            "untrusted_calls": sum(not call.trusted for call in self._tokens.calls),
            "trained_tokens": trained,
            "cut_at_end": int(bool(trusted_calls) and trusted_calls[-1].finish is Finish.LENGTH),
        }
        return stitched, dict(self._stats) | counts

    def _find_tree(self, tools: tuple[Json, ...]) -> _HistoryTree:
        known = next((tree for tree in self._trees if tree.tools == tools), None)
        return known or _HistoryTree(tools, _Node(None), tool_defaults(tools))

    def _branch(self, tree: _HistoryTree, level: list[_Node], rest: Sequence[Message], first: Message) -> Branch | None:
        """Name what the agent changed: the nodes in `level` match its history, the first message of `rest` does not."""
        below = [child for node in level for child in node.all_children()]
        resampled = any(child.call for child in below)
        if not rest:
            return Branch.RETRY if resampled else Branch.REWRITTEN if below else None
        if any(call.id in self._sampled_call_ids for message in rest for call in message.calls):
            edited = rest[0].role == ASSISTANT and resampled
            return Branch.EDITED if edited else Branch.MOVED
        if level == [tree.root]:
            others = [other for other in self._trees if other is not tree]
            return Branch.TOOLS if any(other.root.matching(first, {}) for other in others) else Branch.ROOT
        if rest[0].role == ASSISTANT:
            return Branch.EDITED if resampled else Branch.FOREIGN
        if resampled:
            return Branch.DROPPED
        if below:
            return Branch.FORK if any(node.call for node in level) else Branch.REWRITTEN
        return Branch.FOREIGN if any(message.role == ASSISTANT for message in rest) else None

    def _context_child(self, node: _Node, message: Message, defaults: ToolDefaults) -> _Node:
        """Return the child for a message that was not sampled here, and add it if it is new."""
        for child in node.matching(message, defaults):
            if child.call is None:
                return child
        child = _Node(message)
        node.add(child)
        self.num_bytes += _size(message)
        return child

    def _count(self, plan: PromptPlan, branch: Branch | None, turn: Turn, num_reencoded: int) -> None:
        self._stats["prompt_tokens"] += len(turn.prompt_ids)
        self._stats["sampled_tokens"] += len(turn.sampled_ids)
        if plan.prefix is not None:
            self._stats["splices"] += 1
        else:
            self._stats["reencoded_tokens"] += num_reencoded
        if branch:
            self._stats[f"branch_{branch}"] += 1


_IDS_PER_CALL = 50
"""The memory that a call takes besides its ids, counted in ids."""


def same_message(recorded: Message, sent: Message, defaults: ToolDefaults) -> bool:
    """Whether the message that an agent sent is the recorded one, perhaps written differently.

    Agents trim and re-wrap text, leave out reasoning or the text beside tool calls, serialise arguments differently,
    and add default arguments. Changed ids, names, arguments, text or reasoning make it another message.
    """
    return _key(recorded) == _key(sent) and _same_content(recorded, sent, defaults)


def _key(message: Message) -> _Key:
    """What a message is looked up by: its tool-call ids if it has any, since agents leave those unchanged."""
    if message.role != ASSISTANT:
        return message.role, message.call_id, message.text
    if message.calls:
        return tuple(call.id for call in message.calls)
    return ASSISTANT, _collapsed(message.text)


def _same_content(recorded: Message | None, sent: Message, defaults: ToolDefaults) -> bool:
    """Whether two messages with the same key are the same."""
    if recorded is None:
        return False
    if sent.role != ASSISTANT:
        return recorded == sent
    if _named_calls(recorded, defaults) != _named_calls(sent, defaults):
        return False
    same_text = _absent_or_same(recorded.text, sent.text) if sent.calls else True  # without calls, the text is the key
    return same_text and _absent_or_same(recorded.reasoning, sent.reasoning)


def _named_calls(message: Message, defaults: ToolDefaults) -> list[tuple[str, Json]]:
    return [(call.name, {**defaults.get(call.name, {}), **call.arguments}) for call in message.calls]


def tool_defaults(tools: Sequence[Json]) -> ToolDefaults:
    """The default arguments in the schemas of these tools."""
    functions = [cast("Json", tool["function"]) for tool in tools if isinstance(tool.get("function"), dict)]
    return {function.get("name", ""): _schema_defaults(function.get("parameters")) for function in functions}


def _schema_defaults(parameters: object) -> Json:
    properties = cast("Json", parameters).get("properties") if isinstance(parameters, dict) else None
    schemas = cast("Json", properties) if isinstance(properties, dict) else {}
    return {
        name: schema["default"] for name, schema in schemas.items() if isinstance(schema, dict) and "default" in schema
    }


def _absent_or_same(recorded: str, sent: str) -> bool:
    return not sent.strip() or _collapsed(recorded) == _collapsed(sent)


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _commit_order(node: _Node) -> int:
    assert node.call is not None
    return node.call.number


def _size(message: Message) -> int:
    return len(message.text) + len(message.reasoning) + sum(len(call.arguments_json()) for call in message.calls)
