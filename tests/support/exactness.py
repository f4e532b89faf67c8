"""The judge of recorded histories: what must have been asked and what must be trained, found by brute force.

It knows the gateway's rules, not its trees: every question is answered by comparing whole sequences.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from random_agent import Agent, Asked, Policy, Step, filled_in, run_without_threads

from dockyard.gateway.sessions import Recording
from dockyard.types import ASSISTANT, Json, Message, Segment, ToolCall


@dataclass(frozen=True, eq=False)
class Sampled:
    """A finished call as plain lists."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    asked: Asked

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.sampled


def judge(runner: asyncio.Runner, agent: Agent, steps: Sequence[Step]) -> Recording:
    """Let the agent take its steps, and find nothing wrong with what was recorded."""
    run_without_threads(runner, agent, steps)
    recording = agent.session.close()
    check(agent, recording)
    check_prompts(agent, recording)
    return recording


def check(agent: Agent, recording: Recording) -> None:
    """Everything sampled is trained once, in its own context, in the fewest segments; everything else is counted."""
    calls = [_sampled(asked) for asked in agent.recorded]
    trusted = [call for call in calls if call.asked.trusted]
    kept, num_lost, num_retries = _worth_training(trusted)
    _check_segments(recording.segments, kept, calls)
    strangers, *_ = _worth_training([call for call in calls if not call.asked.trusted])
    _check_segments(recording.untrusted, strangers, calls)
    stats = recording.stats
    assert (stats["undelivered"], stats["dropped_retries"]) == (num_lost, num_retries)
    assert stats["untrusted_calls"] == len(calls) - len(trusted)
    assert stats["sampled_tokens"] == sum(len(call.sampled) for call in calls)
    assert stats["prompt_tokens"] == sum(len(call.prompt) for call in calls)
    assert stats["trained_tokens"] == sum(len(call.sampled) for call in kept)
    assert recording.calls == stats["calls"] == agent.num_started


def _sampled(asked: Asked) -> Sampled:
    assert asked.sampled is not None
    return Sampled(tuple(asked.prompt_ids), tuple(asked.sampled.token_ids.tolist()), asked)


def _worth_training(calls: list[Sampled]) -> tuple[list[Sampled], int, int]:
    """The calls to train, and how many never arrived or were only sampled again."""
    calls = [call for call in calls if call.sampled]
    latest = {call.whole: call for call in calls}
    continued = {id(latest[before]) for call in calls if (before := _longest_beginning(call.prompt, latest))}
    kept: list[Sampled] = []
    same_prompt: defaultdict[tuple[int, ...], list[Sampled]] = defaultdict(list)
    for call in calls:
        same_prompt[call.prompt].append(call)
    for siblings in same_prompt.values():
        gone_on = [call for call in siblings if id(call) in continued]
        arrived = [call for call in siblings if call.asked.delivered]
        kept += gone_on or arrived[-1:]
    others = [call for call in calls if call not in kept]
    num_lost = sum(not call.asked.delivered for call in others)
    return kept, num_lost, len(others) - num_lost


def _longest_beginning(prompt: tuple[int, ...], wholes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The turn that a prompt goes on from; empty if there is none."""
    return max((whole for whole in wholes if _starts_with(prompt, whole)), key=len, default=())


def _starts_with(ids: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    return ids[: len(beginning)] == beginning


def _check_segments(segments: Sequence[Segment], kept: list[Sampled], calls: list[Sampled]) -> None:
    seen = {call.whole for call in calls}
    num_trained = 0
    for segment in segments:
        assert tuple(segment.token_ids.tolist()) in seen  # what the engine was given, and what it sampled
        assert segment.logprobs is not None
        assert segment.versions is not None
        assert (segment.logprobs[~segment.sampled] == 0).all()
        assert (segment.versions[~segment.sampled] == -1).all()
        num_trained += int(segment.sampled.sum())
    for call in kept:
        assert sum(_trains(segment, call) for segment in segments) == 1
    assert num_trained == sum(len(call.sampled) for call in kept)
    wholes = {call.whole for call in kept}
    ends = [whole for whole in wholes if not any(whole != other and _starts_with(other, whole) for other in wholes)]
    assert len(segments) == len(ends)  # no fewer hold every context


def _trains(segment: Segment, call: Sampled) -> bool:
    """Whether the segment trains this call: a logprob names one sampled token."""
    assert segment.logprobs is not None
    assert segment.versions is not None
    assert call.asked.sampled is not None
    drawn = slice(len(call.prompt), len(call.whole))
    if not np.array_equal(segment.logprobs[drawn], call.asked.sampled.logprobs):
        return False
    assert tuple(segment.token_ids[: drawn.stop].tolist()) == call.whole
    assert segment.versions[drawn].tolist() == call.asked.sampled.versions.tolist()
    assert segment.sampled[drawn].all()
    return True


@dataclass(frozen=True, eq=False)
class _Known:
    """A recorded call and the path to it: each message of its history, or the call that sampled it."""

    path: "tuple[Message | _Known, ...]"
    asked: Asked

    @property
    def message(self) -> Message:
        assert self.asked.message is not None
        return self.asked.message


def check_prompts(agent: Agent, recording: Recording) -> None:
    """Every prompt is the longest recorded turn that its history begins with, and the template's own text after it."""
    known: list[_Known] = []
    num_spliced = 0
    for asked in agent.recorded:
        base = _base(known[: asked.num_known], asked)
        _check_prompt(agent.policy, asked, base)
        path = (*base.path, base) if base else ()
        known.append(_Known((*path, *asked.prompt.messages[len(path) :]), asked))
        num_spliced += base is not None
    assert recording.stats["splices"] == num_spliced


def _base(known: list[_Known], asked: Asked) -> _Known | None:
    """The recorded call with the longest history that the asked one begins with; of equals, the latest."""
    found = [(len(call.path), number) for number, call in enumerate(known) if _begins_with(asked, call)]
    return known[max(found)[1]] if found else None


def _begins_with(asked: Asked, call: _Known) -> bool:
    messages = asked.prompt.messages
    if len(messages) <= len(call.path) or asked.prompt.tools != call.asked.prompt.tools:
        return False
    turns = [part.message if isinstance(part, _Known) else part for part in (*call.path, call)]
    names = {tool["function"]["name"] for tool in asked.prompt.tools}
    return all(_is_echo(sent, turn, names) for sent, turn in zip(messages, turns, strict=False))


def _is_echo(sent: Message, turn: Message, tool_names: set[str]) -> bool:
    if sent.role != ASSISTANT or turn.role != ASSISTANT:
        return sent == turn
    if _made(sent, tool_names) != _made(turn, tool_names):
        return False
    said, thought = sent.text.split(), sent.reasoning.split()
    same_text = said == turn.text.split() or bool(sent.calls and not said)
    return same_text and thought in ([], turn.reasoning.split())


def _made(message: Message, tool_names: set[str]) -> list[tuple[str, str, Json]]:
    """The calls with what a tool that the agent knows takes for arguments left out."""
    return [
        (call.id, call.name, filled_in(call) if call.name in tool_names else call.arguments) for call in message.calls
    ]


def _check_prompt(policy: Policy, asked: Asked, base: _Known | None) -> None:
    messages, tools = asked.prompt.messages, asked.prompt.tools
    expected, benign = (policy.plain(told, tools, True) for told in (messages, _benign(policy, messages)))
    ids = asked.prompt_ids
    if base:
        before = base.asked
        assert before.sampled is not None
        whole = before.prompt_ids + before.sampled.token_ids.tolist()
        assert ids[: len(whole)] == whole
        ids = ids[len(whole) :]
        closing = _closing(policy, whole)
        num_messages = len(base.path) + 1
        expected = closing + _after_turn(policy, asked, num_messages, messages)
        benign = closing + _after_turn(policy, asked, num_messages, _benign(policy, messages))
    control = set(policy.control().values())
    assert policy.tokenizer.decode(ids, skip_special_tokens=False) == expected
    scaffold = policy.ids(benign)
    assert [i for i in ids if i in control] == [i for i in scaffold if i in control]
    if benign == expected:
        assert ids == scaffold


def _after_turn(policy: Policy, asked: Asked, num_messages: int, messages: Sequence[Message]) -> str:
    """What the template prints behind the token that ends the last of the first messages."""
    turn = messages[num_messages - 1]
    calls = (replace(turn.calls[0], name=_MARK), *turn.calls[1:]) if turn.calls else ()
    marked = [*messages[: num_messages - 1], replace(turn, text=_MARK, calls=calls), *messages[num_messages:]]
    text = policy.plain(marked, asked.prompt.tools, True)
    stop = policy.tokenizer.decode([policy.stop_id], skip_special_tokens=False)
    return text[text.index(stop, text.rindex(_MARK)) + len(stop) :]


_MARK = "the marked turn"


def _closing(policy: Policy, whole: list[int]) -> str:
    """What ends a turn that was cut."""
    if whole[-1] == policy.stop_id:
        return ""
    text = policy.tokenizer.decode(whole[len(whole) - whole[::-1].index(policy.stop_id) :], skip_special_tokens=False)
    think = policy.control().get("<think>")
    open_thought = "</think>" if think in whole and text.rfind("<think>") > text.rfind("</think>") else ""
    return open_thought + policy.tokenizer.decode([policy.stop_id], skip_special_tokens=False)


def _benign(policy: Policy, messages: Sequence[Message]) -> list[Message]:
    """The messages without any text that spells a control token."""
    spelled = re.compile("|".join(map(re.escape, policy.control())))

    def clean(text: str) -> str:
        return spelled.sub("x", text)

    def clean_call(call: ToolCall) -> ToolCall:
        return replace(call, arguments={clean(key): _map(value) for key, value in call.arguments.items()})

    def _map(value: object) -> object:
        return clean(value) if isinstance(value, str) else value

    return [
        replace(
            message,
            text=clean(message.text),
            reasoning=clean(message.reasoning),
            calls=tuple(map(clean_call, message.calls)),
        )
        for message in messages
    ]
