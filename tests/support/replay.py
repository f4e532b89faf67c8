"""Replays the turns of a policy for requests with exactly the same prompt ids; any other prompt gets no answer."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from server_fakes import FakeSGLang

from dockyard.engine.protocol import ContextOverflow, Engine, GenerateRequest, Generation

type Answer = Generation | ContextOverflow | Exception


@dataclass
class Turns:
    """Answers by the ids of their prompt. Rollouts of one task may ask the same: each answer is given once."""

    answers: dict[tuple[int, ...], list[Answer]] = field(default_factory=lambda: defaultdict(list))
    unknown: list[list[int]] = field(default_factory=list)
    """Prompts that the first policy never saw, or not as often."""

    def replay(self) -> "Turns":
        """All of them once more."""
        return Turns({prompt: list(answers) for prompt, answers in self.answers.items()})

    def take(self, prompt: list[int]) -> Answer:
        left = self.answers.get(tuple(prompt))
        if not left:
            self.unknown.append(prompt)
            return LookupError("nobody was asked this before")
        return left.pop(0)

    @property
    def used_up(self) -> bool:
        return not self.unknown and not any(self.answers.values())


@dataclass
class Recorder:
    """Implements `Engine`: another one, whose turns are kept."""

    engine: Engine
    turns: Turns = field(default_factory=Turns)
    context_length: int = 4096
    version: int = 0
    down_s: float = 0.0

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        try:
            answer: Answer = await self.engine.generate(request)
        except Exception as error:  # whatever a test's engine raises
            answer = error
        self.turns.answers[tuple(request.prompt_ids.tolist())].append(answer)
        return _given(answer)

    async def publish(self, adapter_dir: Path, version: int) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Replayer(Recorder):
    """Implements `Engine`: the same turns again."""

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        return _given(self.turns.take(request.prompt_ids.tolist()))


def _given(answer: Answer) -> Generation | ContextOverflow:
    if isinstance(answer, Exception):
        raise answer
    return answer


@dataclass(kw_only=True)
class ReplayRouter(FakeSGLang):
    """Replays the turns as SGLang's router returns them. A failure is final, so that clients do not retry."""

    turns: Turns

    async def sample(self, adapter: str, prompt: list[int], **asked: Any) -> Any:
        if asked["limit"] == 1:  # whoever connects looks at the logprobs first
            return await super().sample(adapter, prompt, **asked)
        answer = self.turns.take(prompt)
        if not isinstance(answer, Generation):
            raise web.HTTPBadRequest(text=str(answer))
        ids = answer.token_ids.tolist()
        places = [{token: logprob} for token, logprob in zip(ids, answer.logprobs.tolist(), strict=True)]
        return ids, places, answer.finish.value
