"""The session that all clients of a stand-alone server share, with bounded memory.

Each opening (tools, system text, first message) has a session of its own, because two histories that open differently
have no sampled turn in common. When the sessions together hold too many tokens, the least recently used one is dropped.
If its client returns, the whole history is rendered again.
"""

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from dockyard.gateway.accounting import Recording, unknown_key
from dockyard.gateway.protocol import NO_CLIENT_SAMPLING, ClientSampling, ModelReply, RefusedError, dump
from dockyard.gateway.sessions import Session
from dockyard.types import Prompt

MAX_HELD = 8_000_000
"""Tokens kept in memory, at about 25 bytes each."""
MAX_CONVERSATIONS = 4096


@dataclass(slots=True, eq=False)
class SharedSession:
    """Implements `Session` over many sessions. Their records serve to splice prompts, and are dropped with them."""

    open_session: Callable[[], Session]
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    max_held: int = MAX_HELD
    label: str = "serve"
    _sessions: OrderedDict[bytes, Session] = field(default_factory=OrderedDict[bytes, Session])
    _tasks: set[asyncio.Task[ModelReply]] = field(default_factory=set[asyncio.Task[ModelReply]])
    _counts: Counter[str] = field(default_factory=Counter[str])
    _closed: bool = False

    @property
    def num_held(self) -> int:
        return sum(session.num_held for session in self._sessions.values())

    @property
    def stats(self) -> dict[str, int]:
        """The statistics so far."""
        held = {"conversations": len(self._sessions), "held_tokens": self.num_held, "in_flight": len(self._tasks)}
        return {"calls": 0, "prompt_tokens": 0, "sampled_tokens": 0, "forgotten": 0} | self._counts | held

    def submit(
        self, prompt: Prompt, max_tokens: int | None, requested: ClientSampling = NO_CLIENT_SAMPLING
    ) -> asyncio.Task[ModelReply]:
        """Start a call in the session that the prompt belongs to."""
        task = self._session(prompt).submit(prompt, max_tokens, requested)
        self.count("calls")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def count_tokens(self, prompt: Prompt) -> int:
        return await self._session(prompt).count_tokens(prompt)

    def mark_delivered(self, reply: ModelReply, delivered: bool) -> None:
        """Has no effect: these conversations are not trained on."""

    def note_misuse(self, refused: RefusedError) -> None:
        self.count("misuses")

    def count(self, what: str, amount: int = 1) -> None:
        """Add to the server's statistics."""
        self._counts[what] += amount

    def close(self) -> Recording:
        """Refuse further calls and cancel those in progress, also of conversations that were dropped."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        stats = self.stats
        self._sessions.clear()
        return Recording(stats=stats, calls=stats["calls"], answered=stats.get("answered", 0))

    def _session(self, prompt: Prompt) -> Session:
        if self._closed:
            raise unknown_key()
        opening = _opening(prompt)
        if opening not in self._sessions:
            self._sessions[opening] = self.open_session()
        self._sessions.move_to_end(opening)
        return self._sessions[opening]

    def _done(self, task: asyncio.Task[ModelReply]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is None:
            reply = task.result()
            self._counts.update(answered=1, prompt_tokens=reply.num_prompt, sampled_tokens=reply.num_sampled)
        self._forget()

    def _forget(self) -> None:
        """Drop old conversations until the rest fits. Their calls in progress continue."""
        held = self.num_held
        while held > self.max_held or len(self._sessions) > MAX_CONVERSATIONS:
            _, oldest = self._sessions.popitem(last=False)
            held -= oldest.num_held
            self.count("forgotten")


def _opening(prompt: Prompt) -> bytes:
    """A digest of what two histories must share to have a sampled turn in common."""
    opening = prompt.messages[: 1 if prompt.messages[0].role != "system" else 2]
    first = [(message.role, message.text, message.call_id) for message in opening]
    return sha256(dump([prompt.tools, first])).digest()
