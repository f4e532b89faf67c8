"""Decides which calls of a session the agent's harness made.

The policy has a shell and can read its agent's key, so it could call the gateway itself. Only calls of the harness are
trained on.
"""

from dataclasses import dataclass

from dockyard.types import Json, Message, Prompt

_LONG_TEXT = 16
"""A text of at least this many characters does not appear in a subagent's prompt by chance."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """What a call reveals about its caller."""

    system: str
    tools: tuple[Json, ...]
    auxiliary: bool
    first_user_text: str
    arguments: tuple[str, ...]
    """Long texts that the policy's reply passed to tools."""

    def is_like(self, other: "_Opening") -> bool:
        same_system, same_tools = self.system == other.system, self.tools == other.tools
        return (same_system and same_tools) or (same_system and self.system != "") or (same_tools and self.tools != ())


class CallOrigins:
    """Records how each call of a session opens, and distinguishes the harness's calls from others.

    The first call that is not auxiliary shows the harness's system text and tools. If that call has no tools and no
    other call is like it, but there is a conversation with tools, it was a probe or a title generator, and the
    conversation with tools is the harness. Another call is the harness's own if it has the same system text or the
    same tools, or if the policy asked for it: a subagent's prompt contains an argument of one of the policy's tool
    calls. Calls like a recognised subagent's are trusted from then on, because compaction removes that prompt.
    """

    def __init__(self) -> None:
        self._openings: list[_Opening] = []
        self._texts: dict[str, str] = {}
        """Stores each text once, because calls repeat them."""

    def add(self, prompt: Prompt, tools: tuple[Json, ...], reply: Message) -> None:
        """Record a call. `tools` equals the prompt's tools; the same object is passed for all calls that share it."""
        first_user_text = next((message.text for message in prompt.messages if message.role == "user"), "")
        values = (value for call in reply.calls for value in call.arguments.values())
        arguments = tuple(value for value in values if isinstance(value, str) and len(value) >= _LONG_TEXT)
        self._openings.append(
            _Opening(self._interned(prompt.system), tools, prompt.auxiliary, self._interned(first_user_text), arguments)
        )

    def trusted(self) -> list[bool]:
        """For each call, whether the harness made it."""
        own = self._find_harness()
        arguments: set[str] = set()
        verdicts: list[bool] = []
        for opening in self._openings:
            trusted = not opening.auxiliary and any(map(opening.is_like, own))
            if not trusted and not opening.auxiliary and opening.tools:
                trusted = any(argument in opening.first_user_text for argument in arguments)
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

    def _interned(self, text: str) -> str:
        return self._texts.setdefault(text, text)
