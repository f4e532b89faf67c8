"""Adds tokens to a recorded attempt: the sampled ids if they were recorded, else by tokenising its text.

Text is tokenised as in the gateway: each turn is encoded as it would have been sampled, and only new messages are
rendered. If a template cannot render messages alone, the whole history is rendered, and a new segment begins where it
does not continue the one before. An unexpected error in the files of one attempt skips that attempt only.
"""

import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from dockyard.convert.conversation import Conversation, Converted, without_malformed
from dockyard.engine.model_dir import find_model
from dockyard.gateway.protocol import one_system
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.gateway.token_tree import stitch_turns
from dockyard.settings.arguments import argument_error
from dockyard.types import IntArray, Prompt, Rollout, Segment, Turn


def segments_of(conversation: Conversation, renderer: Renderer) -> tuple[Segment, ...]:
    """Segments with the model's messages marked, without logprobs. Raises `TemplateRejectionError`."""
    return stitch_turns(_turns(_with_one_system(conversation), renderer))


def _with_one_system(conversation: Conversation) -> Conversation:
    """The same conversation with one system message at most, at the start: templates accept no other."""
    messages = one_system(conversation.messages)
    num_gone = len(conversation.messages) - len(messages)
    sampled = frozenset(place - num_gone for place in conversation.replies)
    cut = frozenset(place - num_gone for place in conversation.cut)
    return replace(conversation, messages=messages, sampled=sampled, cut=cut)


def _turns(conversation: Conversation, renderer: Renderer) -> Iterator[Turn]:
    before: tuple[int, Turn] | None = None
    for place in conversation.replies:
        prompt_ids = _prompt(conversation, place, before, renderer)
        reply_ids = renderer.reply(conversation.messages[place], conversation.tools)
        turn = Turn(prompt_ids=prompt_ids, sampled_ids=reply_ids[:-1] if place in conversation.cut else reply_ids)
        before = place, turn
        yield turn


def _prompt(conversation: Conversation, place: int, before: tuple[int, Turn] | None, renderer: Renderer) -> IntArray:
    """The prompt of the reply at this index. `before` is the index and turn of the previous reply, if any."""
    messages, tools = conversation.messages, conversation.tools
    if place == 0:
        raise TemplateRejectionError("there is no message before the model's first reply")
    if before is not None:
        last, turn = before
        prefix, new = (turn.prompt_ids, turn.sampled_ids), messages[last + 1 : place]
        ids = renderer.extend(prefix, messages[last].calls, new, tools)
        if ids is not None:
            return ids
    return renderer.prompt(Prompt(messages[:place], tools))


@runtime_checkable
class SavedTokenizer(Protocol):
    """A tokenizer of `transformers`."""

    name_or_path: str

    def save_pretrained(self, save_directory: str) -> object: ...


def load_renderer(tokenizer: "Renderer | Path | str | SavedTokenizer") -> Renderer:
    """Load the renderer of a model."""
    if isinstance(tokenizer, Renderer):
        return tokenizer
    if isinstance(tokenizer, Path | str):
        folder = Path(tokenizer).expanduser()
        is_folder = (folder / "tokenizer.json").is_file()  # the weights are not needed
        return Renderer.load(folder if is_folder else find_model(str(tokenizer), weights=False), str(tokenizer))
    if not isinstance(tokenizer, SavedTokenizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected = "a model folder, a name on the Hub, or a tokenizer of `transformers`"
        raise argument_error("tokenizer", tokenizer, expected, hint='`tokenizer="MODEL"`')
    with tempfile.TemporaryDirectory(prefix="dockyard-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return Renderer.load(Path(folder), tokenizer.name_or_path)


_WORD = re.compile(r"\w{3,}")
_ENOUGH_WORDS = 5
_MIN_SHARE = 0.5
_MAX_TEXT = 20_000
_OF_ATTEMPTS = ("no_reward", "trajectory_unreadable")
"""Notes that also apply if ids are known. The other notes concern text only."""


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Adds tokens to attempts."""

    renderer: Renderer | None
    exact: bool = True
    """Whether stored ids are used."""

    def tokenise(self, found: Converted, turns: Sequence[Sequence[Turn]] = (), text: str = "") -> Converted:
        """The attempt with segments, or with the reason why it has none.

        `turns` are the turns whose ids its trajectory has. `text` is compared with the decoded ids if there are no
        conversations.
        """
        if found.skipped is not None:
            return found
        kept = found.rollout.segments or tuple(segment for history in turns for segment in stitch_turns(history))
        if not self.exact or not kept:
            return self._from_text(found)
        spoken = (message.text for conversation in found.conversations for message in conversation.messages)
        expected = text or "\n".join(spoken)
        ids = [segment.token_ids for segment in kept]
        if self.renderer and (difference := tokenizer_mismatch(ids, expected, self.renderer)):
            return skip(found, "other_tokenizer", f"{difference}; `--text` renders the text instead")
        return _as_sampled(found, kept, sum(map(len, turns)))

    def _from_text(self, found: Converted) -> Converted:
        spoken = [conversation for conversation in found.conversations if conversation.replies]
        if not spoken:
            return skip(found, "no_trajectory", found.detail or "no file of the agent contains the conversation")
        own = [conversation for one in spoken if (conversation := without_malformed(one)).replies]
        if not own:
            return skip(found, "not_renderable", "none of the model's tool calls has valid JSON arguments")
        if self.renderer is None:
            return skip(found, "no_tokenizer", "the attempt has no token ids; `--tokenizer MODEL` tokenises its text")
        try:
            segments = tuple(segment for conversation in own for segment in segments_of(conversation, self.renderer))
        except TemplateRejectionError as error:
            return skip(found, "not_renderable", str(error))
        thoughts = any(conversation.messages[place].reasoning for conversation in own for place in conversation.replies)
        notes = {
            "thoughts_left_out": thoughts and not self.renderer.keeps_thoughts,
            "malformed_calls": own != spoken,
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
    """The same attempt, marked as skipped."""
    return replace(found, skipped=why, detail=detail, rollout=replace(found.rollout, segments=()))


def tokenizer_mismatch(sequences: Sequence[IntArray], text: str, renderer: Renderer) -> str | None:
    """Why the ids must come from another tokenizer; None if they can be from this one."""
    highest = max(int(ids.max(initial=0)) for ids in sequences)
    lowest = min(int(ids.min(initial=0)) for ids in sequences)
    if highest >= renderer.max_ids or lowest < 0:
        return f"id {highest if lowest >= 0 else lowest} is not in this tokenizer's vocabulary"
    expected = set(_WORD.findall(text[:_MAX_TEXT]))
    if len(expected) < _ENOUGH_WORDS:
        return None
    read = {word for ids in sequences for word in _WORD.findall(renderer.text(ids))}
    share = len(expected & read) / len(expected)
    return None if share >= _MIN_SHARE else f"its decoded ids contain {share:.0%} of the words of the conversation"


logger = logging.getLogger(__name__)


def isolate_errors(found: Converted, convert: Callable[[], Converted]) -> Converted:
    """The result of `convert`; if it raises, `found` marked as unreadable."""
    try:
        return convert()
    except Exception as error:  # agents write these files, so any error is possible
        logger.debug("%s", found.where, exc_info=True)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return skip(found, "unreadable", f"{found.where}: {reason}")


def blank(where: str, *, trial: str = "", task: str = "", agent: str = "", model: str = "") -> Converted:
    """An attempt of which nothing else is known."""
    rollout = Rollout(task=task, kind="", attempt=0, segments=(), reward=None, failure=None)
    return Converted(where=where, trial=trial, agent=agent, model=model, rollout=rollout)
