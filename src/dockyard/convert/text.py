"""A conversation in words becomes segments: the model's own template, its own tokenizer, each message once.

Every turn is put behind what came before it as it would have been sampled, and only new messages are tokenised, as the
gateway does it. Where the template lets nothing be rendered on its own, the whole history is, and a segment ends where
that is no continuation.
"""

from collections.abc import Iterator
from dataclasses import replace

from dockyard.convert.conversation import Conversation
from dockyard.gateway.calls import one_system
from dockyard.gateway.history import Prompt
from dockyard.gateway.render import Renderer
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.rollout.details import KeptTurn, stitch
from dockyard.types import IntArray, Segment


def segments_of(conversation: Conversation, renderer: Renderer) -> tuple[Segment, ...]:
    """With the model's own messages marked; nobody recorded logprobs. Raises `TemplateRejectionError`."""
    return tuple(stitch(_turns(with_one_system(conversation), renderer)))


def with_one_system(conversation: Conversation) -> Conversation:
    """The same with at most one system text, in front: templates know no other."""
    messages = one_system(conversation.messages)
    num_gone = len(conversation.messages) - len(messages)
    sampled = None if conversation.sampled is None else _moved(conversation.sampled, num_gone)
    return replace(conversation, messages=messages, sampled=sampled, cut=_moved(conversation.cut, num_gone))


def _moved(places: frozenset[int], num_gone: int) -> frozenset[int]:
    return frozenset(place - num_gone for place in places)


def _turns(conversation: Conversation, renderer: Renderer) -> Iterator[KeptTurn]:
    before: tuple[int, KeptTurn] | None = None
    for place in conversation.replies:
        prompt_ids = _prompt(conversation, place, before, renderer)
        said = renderer.reply(conversation.messages[place], conversation.tools)
        turn = KeptTurn(prompt_ids, said[:-1] if place in conversation.cut else said)
        before = place, turn
        yield turn


def _prompt(
    conversation: Conversation, place: int, before: tuple[int, KeptTurn] | None, renderer: Renderer
) -> IntArray:
    """What the model was given to say the message at this place; `before` is its message before that, if any."""
    messages, tools = conversation.messages, conversation.tools
    if place == 0:
        raise TemplateRejectionError("nothing comes before the model's first message")
    if before is not None:
        last, turn = before
        prefix, new = (turn.prompt_ids, turn.sampled_ids), messages[last + 1 : place]
        ids = renderer.extend(prefix, messages[last].calls, new, tools)
        if ids is not None:
            return ids
    return renderer.prompt(Prompt(messages[:place], tools))
