"""The tokens of a recorded attempt: as they were sampled where somebody kept them, else made from its text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dockyard.convert.conversation import Conversation, Converted, without_malformed
from dockyard.convert.text import segments_of
from dockyard.gateway.render import Renderer
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.rollout.details import KeptTurn, stitch
from dockyard.types import Rollout, Segment

_WORD = re.compile(r"\w{3,}")
_ENOUGH_WORDS = 5
_MIN_SHARE = 0.5
_MAX_TEXT = 20_000
_OF_ATTEMPTS = ("no_reward", "trajectory_unreadable")
"""The other notes are on words, which do not matter where ids are known."""


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Gives attempts their tokens."""

    renderer: Renderer | None
    exact: bool = True
    """Whether ids that were kept are used."""

    def give(self, found: Converted, turns: Sequence[Sequence[KeptTurn]] = (), text: str = "") -> Converted:
        """The attempt as training data, or with the reason why it is none.

        `turns` are those whose ids its trajectory has; `text` is what ids should read as if no conversation tells.
        """
        if found.skipped is not None:
            return found
        kept = found.rollout.segments or tuple(segment for history in turns for segment in stitch(history))
        if not self.exact or not kept:
            return self._from_text(found)
        told = text or _text(found.conversations)
        if self.renderer and (difference := foreign(kept, told, self.renderer)):
            return skip(found, "other_tokenizer", f"{difference}; `--text` renders the text instead")
        return _as_sampled(found, kept, sum(map(len, turns)))

    def _from_text(self, found: Converted) -> Converted:
        told = [conversation for conversation in found.conversations if conversation.replies]
        if not told:
            return skip(found, "no_trajectory", found.detail or "no file of the agent's tells what was said")
        own = [conversation for one in told if (conversation := without_malformed(one)).replies]
        if not own:
            return skip(found, "not_renderable", "the arguments of all of the model's calls are no JSON")
        if self.renderer is None:
            return skip(found, "no_tokenizer", "no ids were kept; `--tokenizer MODEL` makes them from the text")
        try:
            segments = tuple(segment for conversation in own for segment in segments_of(conversation, self.renderer))
        except TemplateRejectionError as error:
            return skip(found, "not_renderable", str(error))
        thoughts = any(conversation.messages[place].reasoning for conversation in own for place in conversation.replies)
        notes = {
            "thoughts_left_out": thoughts and not self.renderer.keeps_thoughts,
            "malformed_calls": own != told,
        }
        noted = (*found.notes, *(name for name, applies in notes.items() if applies))
        return replace(found, notes=noted, rollout=_trained(found, segments))


def _as_sampled(found: Converted, kept: tuple[Segment, ...], num_turns: int) -> Converted:
    num_kept = found.rollout.stats.get("calls", 0) if found.rollout.segments else num_turns
    some_lost = sum(len(conversation.replies) for conversation in found.conversations) > num_kept
    notes = (*(note for note in found.notes if note in _OF_ATTEMPTS), *(["turns_without_ids"] if some_lost else []))
    return replace(found, exact=True, notes=notes, rollout=_trained(found, kept))


def _trained(found: Converted, segments: tuple[Segment, ...]) -> Rollout:
    trained = sum(int(segment.sampled.sum()) for segment in segments)
    return replace(found.rollout, segments=segments, stats=found.rollout.stats | {"trained_tokens": trained})


def skip(found: Converted, why: str, detail: str) -> Converted:
    """The same, but no training data."""
    return replace(found, skipped=why, detail=detail, rollout=replace(found.rollout, segments=()))


def foreign(segments: Sequence[Segment], text: str, renderer: Renderer) -> str | None:
    """How it shows that the ids are another tokenizer's; None if they may be this one's."""
    highest = max(int(segment.token_ids.max(initial=0)) for segment in segments)
    lowest = min(int(segment.token_ids.min(initial=0)) for segment in segments)
    if highest >= renderer.max_ids or lowest < 0:
        return f"id {highest if lowest >= 0 else lowest} is none of this tokenizer's"
    expected = set(_WORD.findall(text[:_MAX_TEXT]))
    if len(expected) < _ENOUGH_WORDS:
        return None
    read = {word for segment in segments for word in _WORD.findall(renderer.text(segment.token_ids))}
    share = len(expected & read) / len(expected)
    return None if share >= _MIN_SHARE else f"its ids read as {share:.0%} of the words that were said"


def _text(conversations: Sequence[Conversation]) -> str:
    return "\n".join(message.text for conversation in conversations for message in conversation.messages)
