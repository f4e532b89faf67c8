"""`dockyard doctor MODEL`: how the model's prompts are built, and which agents fit into its context."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel
from rich.text import Text

from dockyard.engine.model_dir import find_model
from dockyard.gateway.render.renderer import Renderer, Rendering
from dockyard.gateway.render.splice import CallFormat
from dockyard.gateway.render.template import (
    ChatTemplate,
    TemplateRejectionError,
    TokenizerConfig,
    read_config,
    template_source,
)

FIRST_PROMPTS = {
    "mini-swe-agent": 850,
    "claude-code --bare": 1_050,
    "qwen-code --bare": 7_250,
    "codex": 9_100,
    "claude-code": 11_000,
    "qwen-code": 16_800,
    "claude-code 2.1.197": 18_750,
}
"""Number of tokens of an agent's first prompt (system prompt and tools), counted with Qwen3's tokenizer."""
_ROOM = 4096
"""Tokens that a few turns after the first prompt need."""
_MARK = "\ue000system\ue001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether an agent's first prompt fits into the context."""

    agent: str
    first_prompt: int
    fits: Literal["yes", "tight", "no", "unknown"]

    @classmethod
    def of(cls, agent: str, first_prompt: int, context_length: int | None) -> Self:
        if context_length is None:
            return cls(agent=agent, first_prompt=first_prompt, fits="unknown")
        room = context_length - first_prompt
        return cls(
            agent=agent, first_prompt=first_prompt, fits="yes" if room >= _ROOM else "tight" if room > 0 else "no"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """How the gateway handles a model."""

    model: str
    folder: Path
    rendering: Rendering
    context_length: int | None
    """From `config.json`; None if it has none."""
    default_system: str | None
    """The system prompt that the template inserts if an agent sends none."""
    fits: tuple[Fit, ...]

    @property
    def tools_preamble(self) -> bool:
        return self.rendering.tool_calls == CallFormat.PREAMBLE

    @property
    def warnings(self) -> list[str]:
        found: list[str] = []
        if not self.rendering.splices:
            found.append(
                "this template cannot render new messages alone: the history is rendered again at each call, and a "
                "rollout becomes several segments"
            )
        if self.context_length is None:
            found.append("`config.json` has no context length: set `--engine.context_length`")
        if large := [f"{fit.agent} (about {fit.first_prompt:,})" for fit in self.fits if fit.fits == "no"]:
            found.append(
                f"these agents need more than the context's {self.context_length:,} tokens for their first prompt: "
                + ", ".join(large)
            )
        return found


def examine_model(name: str) -> ModelReport:
    """Load the model's tokenizer and template, without weights or torch."""
    folder = find_model(name, weights=False)
    renderer = Renderer.load(folder, name)
    context_length = read_config(folder / "config.json", _Config).context_length()
    return ModelReport(
        model=name,
        folder=folder,
        rendering=renderer.rendering,
        context_length=context_length,
        default_system=_default_system(folder),
        fits=tuple(Fit.of(agent, tokens, context_length) for agent, tokens in FIRST_PROMPTS.items()),
    )


def model_to_json(report: ModelReport) -> str:
    """Return the report as JSON."""
    found = asdict(report) | {"folder": str(report.folder), "tools_preamble": report.tools_preamble}
    return json.dumps(found | {"warnings": report.warnings}, indent=2)


def model_to_text(report: ModelReport) -> Text:
    """Return the report as text."""
    rendering = report.rendering
    preamble = "; the template has none, so the system prompt describes the tools" if report.tools_preamble else ""
    default = "none" if report.default_system is None else repr(report.default_system)
    rows = [
        ("model", f"{report.model} ({report.folder})"),
        ("renderer", rendering.renderer),
        ("tool calls", rendering.tool_calls + preamble),
        ("splices", "yes: a rollout is one sequence" if rendering.splices else "no"),
        ("stop tokens", " ".join(rendering.stop_tokens)),
        ("default system", default),
        ("context", "unknown" if report.context_length is None else f"{report.context_length:,} tokens"),
    ]
    text = Text()
    for name, value in rows:
        text.append(f"{name:<15}", style="bold").append(f" {value}\n")
    text.append("\nfirst prompts of agents, in tokens of Qwen3\n", style="bold").append(_fit_table(report.fits))
    for warning in report.warnings:
        text.append("warning", style="yellow").append(f": {warning}\n")
    return text


def _fit_table(fits: Sequence[Fit]) -> Text:
    styles = {"yes": "green", "tight": "yellow", "no": "red", "unknown": ""}
    words = {
        "yes": "fits",
        "tight": f"fits, with less than {_ROOM:,} tokens to spare",
        "no": "does not fit",
        "unknown": "",
    }
    table = Text()
    for fit in fits:
        table.append(f"{fit.agent:<20} {fit.first_prompt:>7,}  ").append(words[fit.fits] + "\n", style=styles[fit.fits])
    return table


class _Config(BaseModel):
    """The fields of `config.json` that contain the context length."""

    max_position_embeddings: int | None = None
    n_positions: int | None = None
    text_config: "_Config | None" = None

    def context_length(self) -> int | None:
        nested = self.text_config.context_length() if self.text_config else None
        return nested or self.max_position_embeddings or self.n_positions


def _default_system(folder: Path) -> str | None:
    """Return the system prompt that the template inserts, found by comparing prompts with and without one."""
    config = read_config(folder / "tokenizer_config.json", TokenizerConfig)
    template = ChatTemplate(template_source(folder, config), config.special_tokens())
    user = {"role": "user", "content": "hello"}
    try:
        with_system = template.render([{"role": "system", "content": _MARK}, user], prompt=True)
        without = template.render([user], prompt=True)
    except TemplateRejectionError:
        return None
    head, _, tail = with_system.partition(_MARK)
    inserted = without.removeprefix(head).removesuffix(tail)
    return inserted if head + inserted + tail == without and inserted else None
