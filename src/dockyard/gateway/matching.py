"""What a session's calls have in common: a tree of messages to recognise a returning history by.

It is apart from the tree of ids on purpose. An agent may echo a turn with other whitespace, reordered arguments or
without its thoughts, and it is still that turn; for training only equal ids count.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self, TypeGuard, cast

from dockyard.gateway.messages import ASSISTANT, Message, Prompt, ToolCall
from dockyard.gateway.token_tree import RecordedCall, Stitched, TokenTree
from dockyard.types import Finish, IntArray, Json, Turn


class Branch(StrEnum):
    """Why a call does not simply continue the turn before it."""

    ROOT = "root"
    """Another opening: a side call, a subagent, a compacted history."""
    TOOLS = "tools"
    """The same opening with other tools."""
    EDITED = "edited"
    """The agent changed a sampled turn."""
    DROPPED = "dropped"
    """The agent left a sampled turn out."""
    MOVED = "moved"
    """A sampled turn came back in another history, as after a compaction. It is context there."""
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


type _Key = tuple[object, ...]
type _Defaults = Mapping[str, Json]
"""Arguments that each tool's schema fills in. claude-code writes them into what it sends back."""


@dataclass(slots=True, eq=False)
class _Node:
    """A message in the tree of histories; `call` if the policy sampled it."""

    message: Message | None
    call: RecordedCall | None = None
    children: dict[_Key, "list[_Node]"] = field(default_factory=dict[_Key, "list[_Node]"])

    def add(self, child: "_Node") -> None:
        assert child.message is not None
        self.children.setdefault(_key(child.message), []).append(child)

    def matching(self, message: Message, defaults: _Defaults) -> "list[_Node]":
        return [child for child in self.children.get(_key(message), ()) if _same(child.message, message, defaults)]

    def all_children(self) -> "list[_Node]":
        return [child for twins in self.children.values() for child in twins]


@dataclass(slots=True, eq=False)
class _Root:
    """The histories told with one set of tools."""

    tools: tuple[Json, ...]
    node: _Node
    defaults: _Defaults

    @classmethod
    def of(cls, tools: tuple[Json, ...]) -> Self:
        return cls(tools, _Node(None), {tool["function"]["name"]: schema_defaults(tool) for tool in tools})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """How to build the prompt of a call: keep `prefix` as sampled and append `new`, or render everything."""

    prompt: Prompt
    prefix: tuple[IntArray, IntArray] | None
    """Prompt and sampled ids of the last sampled turn the agent still has; None when there is none."""
    calls: tuple[ToolCall, ...]
    """The tool calls of that turn."""
    new: tuple[Message, ...]
    """The messages after it."""
    branch: Branch | None
    node: _Node | None
    """The sampled turn that `new` follows in the tree of histories; None for its root."""

    def without_splice(self) -> "PromptPlan":
        """The same call when `new` cannot be rendered on its own."""
        return replace(self, prefix=None, branch=self.branch or Branch.UNSAFE)


class Forest:
    """Everything one session said and sampled."""

    def __init__(self) -> None:
        self._roots: list[_Root] = []
        self._tokens = TokenTree()
        self._minted: set[str] = set()
        """Ids of the tool calls that the policy made."""
        self._origin = _Origin()
        self.num_held = 0
        """Ids stored, those that histories share once, with something for each call."""
        self.num_bytes = 0
        """Of the messages stored."""
        self._stats = Counter(prompt_tokens=0, sampled_tokens=0, splices=0, reencoded_tokens=0)

    def plan(self, prompt: Prompt) -> PromptPlan:
        """Find the deepest sampled turn whose whole history is a prefix of the prompt's. Changes nothing."""
        messages = prompt.messages
        root = self._find_root(prompt.tools)
        level, base, num_base = [root.node], None, 0
        num_matched = 0
        for message in messages:
            below = [child for node in level for child in node.matching(message, root.defaults)]
            if not below:
                break
            level, num_matched = below, num_matched + 1
            sampled = [node for node in level if node.call]
            if sampled:  # twins: the agent most likely holds the one it was given last
                base, num_base = max(sampled, key=_commit_order), num_matched
        rest = messages[num_matched:]
        return PromptPlan(
            prompt=prompt,
            prefix=base.call.turn_ids() if base and base.call else None,
            calls=base.message.calls if base and base.message else (),
            new=messages[num_base:],
            branch=self._branch(root, level, rest, messages[0]) if self._tokens.calls else None,
            node=base,
        )

    def commit(self, plan: PromptPlan, turn: Turn, message: Message) -> RecordedCall:
        """Record a finished call."""
        is_first = not self._tokens.calls
        # Not the plan's reason: another call may have come in between.
        branch = plan.branch if plan.branch is Branch.UNSAFE else self.plan(plan.prompt).branch
        call, num_shared = self._tokens.record(turn)
        self.num_held += call.prompt_len - num_shared + len(turn.sampled_ids) + _PER_CALL
        self._count(plan, branch, turn, 0 if is_first else call.prompt_len - num_shared)
        root = self._keep_root(plan.prompt.tools)
        node = plan.node or root.node
        for new in plan.new:
            node = self._context_child(node, new, root.defaults)
        node.add(_Node(message, call))
        self.num_bytes += _size(message)
        self._minted.update(made.id for made in message.calls)
        self._origin.note(plan.prompt, root.tools, message)
        return call

    def mark_undelivered(self, number: int) -> None:
        """The agent hung up before it had this turn. It is trained only if a later call shows that it arrived."""
        self._tokens.calls[number].delivered = False

    def mark_delivered(self, number: int) -> None:
        """It got the turn after all, on a second try."""
        self._tokens.calls[number].delivered = True

    def stitch(self) -> tuple[Stitched, dict[str, int]]:
        """The segments, and the counts."""
        for call, trusted in zip(self._tokens.calls, self._origin.judge(), strict=True):
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

    def _find_root(self, tools: tuple[Json, ...]) -> _Root:
        return next((root for root in self._roots if root.tools == tools), None) or _Root.of(tools)

    def _keep_root(self, tools: tuple[Json, ...]) -> _Root:
        root = self._find_root(tools)
        if root not in self._roots:
            self._roots.append(root)
        return root

    def _branch(self, root: _Root, level: list[_Node], rest: Sequence[Message], first: Message) -> Branch | None:
        """Name what the agent did where the walk stopped: `level` matched, the first of `rest` did not."""
        below = [child for node in level for child in node.all_children()]
        resampled = any(child.call for child in below)
        if not rest:
            return Branch.RETRY if resampled else Branch.REWRITTEN if below else None
        if any(call.id in self._minted for message in rest for call in message.calls):
            edited = rest[0].role == ASSISTANT and resampled
            return Branch.EDITED if edited else Branch.MOVED
        if level == [root.node]:
            others = [other for other in self._roots if other is not root]
            return Branch.TOOLS if any(other.node.matching(first, {}) for other in others) else Branch.ROOT
        if rest[0].role == ASSISTANT:
            return Branch.EDITED if resampled else Branch.FOREIGN
        if resampled:
            return Branch.DROPPED
        if below:
            return Branch.FORK if any(node.call for node in level) else Branch.REWRITTEN
        return Branch.FOREIGN if any(message.role == ASSISTANT for message in rest) else None

    def _context_child(self, node: _Node, message: Message, defaults: _Defaults) -> _Node:
        """The child for a message that was not sampled here, made if it is new."""
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


_PER_CALL = 50
"""What a call costs beyond its ids, in ids."""
_LONG = 16
"""A string this long in a subagent's prompt was not written there by chance."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """What a call shows of who made it."""

    system: str
    tools: tuple[Json, ...]
    auxiliary: bool
    first_words: str
    """Of the user."""
    arguments: tuple[str, ...]
    """Long texts that the policy's answer passed to tools."""

    def is_like(self, other: "_Opening") -> bool:
        same_system, same_tools = self.system == other.system, self.tools == other.tools
        return (same_system and same_tools) or (same_system and self.system != "") or (same_tools and self.tools != ())


class _Origin:
    """Tells the harness's calls from others: the policy has a shell, and could call the gateway itself.

    The first call that is no side call shows the harness's system text and tools. If it has no tools and nothing like
    it came again, but a conversation with tools did, it was a probe or a title. Others are the harness's own if they
    carry one of the two, or if the policy asked for them: a subagent's prompt is an argument of some tool call. What a
    subagent carries is known from then on: after a compaction its prompt is gone.
    """

    def __init__(self) -> None:
        self._openings: list[_Opening] = []
        self._texts: dict[str, str] = {}
        """Each text once: calls repeat them."""

    def note(self, prompt: Prompt, tools: tuple[Json, ...], reply: Message) -> None:
        """Remember a call; `tools` is the one copy of the prompt's that is kept."""
        words = next((message.text for message in prompt.messages if message.role == "user"), "")
        values = (value for call in reply.calls for value in call.arguments.values())
        long = tuple(value for value in values if isinstance(value, str) and len(value) >= _LONG)
        self._openings.append(
            _Opening(self._once(prompt.system), tools, prompt.auxiliary, self._once(words), tuple(long))
        )

    def judge(self) -> list[bool]:
        """Which calls the harness made."""
        own = self._find_harness()
        arguments: set[str] = set()
        verdicts: list[bool] = []
        for opening in self._openings:
            trusted = not opening.auxiliary and any(map(opening.is_like, own))
            if not trusted and not opening.auxiliary and opening.tools:
                trusted = any(argument in opening.first_words for argument in arguments)
                own += [opening] if trusted else []
            arguments.update(opening.arguments if trusted else ())
            verdicts.append(trusted)
        return verdicts

    def _find_harness(self) -> list[_Opening]:
        real = [opening for opening in self._openings if not opening.auxiliary]
        if real and not real[0].tools and self._num_like(real[0]) == 1:
            with_tools = (opening for opening in real if opening.tools and self._num_like(opening) > 1)
            return [next(with_tools, real[0])]
        return real[:1]

    def _num_like(self, opening: _Opening) -> int:
        return sum(opening.is_like(other) for other in self._openings)

    def _once(self, text: str) -> str:
        return self._texts.setdefault(text, text)


def _key(message: Message) -> _Key:
    """Where in the tree to look for a message: tool-call ids first, they are what agents leave alone."""
    if message.role != ASSISTANT:
        return message.role, message.call_id, message.text
    if message.calls:
        return tuple(call.id for call in message.calls)
    return ASSISTANT, _collapsed(message.text)


def same_message(recorded: Message, sent: Message, defaults: _Defaults) -> bool:
    """Whether the message that the agent sent is the one recorded, in other words perhaps."""
    return _key(recorded) == _key(sent) and _same(recorded, sent, defaults)


def _same(recorded: Message | None, sent: Message, defaults: _Defaults) -> bool:
    """Is the message the agent sent the one recorded? Agents trim, re-wrap and leave out, and write JSON anew."""
    if recorded is None:
        return False
    if sent.role != ASSISTANT:
        return recorded == sent
    if _called(recorded, defaults) != _called(sent, defaults):
        return False
    said = _absent_or_same(recorded.text, sent.text) if sent.calls else True  # else it is the key
    return said and _absent_or_same(recorded.reasoning, sent.reasoning)


def _called(message: Message, defaults: _Defaults) -> list[tuple[str, Json]]:
    return [(call.name, {**defaults.get(call.name, {}), **call.arguments}) for call in message.calls]


def schema_defaults(tool: Json) -> Json:
    """The arguments that a tool fills in by itself."""
    properties = tool["function"]["parameters"].get("properties")
    schemas = cast("Json", properties) if isinstance(properties, dict) else {}
    return {name: schema["default"] for name, schema in schemas.items() if _has_default(schema)}


def _has_default(schema: object) -> TypeGuard[Json]:
    return isinstance(schema, dict) and "default" in schema


def _absent_or_same(recorded: str, sent: str) -> bool:
    return not sent.strip() or _collapsed(recorded) == _collapsed(sent)


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _commit_order(node: _Node) -> int:
    assert node.call is not None
    return node.call.number


def _size(message: Message) -> int:
    return len(message.text) + len(message.reasoning) + sum(len(call.arguments_json()) for call in message.calls)
