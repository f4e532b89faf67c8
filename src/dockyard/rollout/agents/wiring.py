"""What leads an agent to the gateway: base URL, key and model name, by the way its row names."""

# pyright: reportMissingTypeStubs=false

from dataclasses import dataclass, field
from typing import Any

from dockyard.rollout.agents.rows import FORMATS
from dockyard.rollout.agents.table import Row, Wiring
from dockyard.rollout.shell import API_KEY_VARIABLE

MODEL_NAME = "policy"
"""What agents call the model. Short, and without a slash, which LiteLLM would read as a provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one rollout's agent finds the policy."""

    root_url: str
    key: str = field(repr=False)

    @property
    def url(self) -> str:
        """What an OpenAI client is given."""
        return f"{self.root_url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """The parts of Harbor's agent settings that carry the wiring."""

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    kwargs: dict[str, str] = field(default_factory=dict[str, str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Harbor keeps the values of variables that are named like keys out of the trial's files."""


def wire(row: Row, endpoint: Endpoint) -> Wired:
    """An agent's way to this endpoint."""
    model: dict[str, Any] = {"model_name": f"{row.provider}/{MODEL_NAME}" if row.provider else MODEL_NAME}
    url = endpoint.root_url if row.at_root else endpoint.url
    match row.wiring:
        case Wiring.NONE:
            return Wired()
        case Wiring.ENV:
            return Wired(fields=model, env={"OPENAI_API_KEY": endpoint.key, "OPENAI_BASE_URL": url})
        case Wiring.KWARGS:
            kwargs = {row.url_kwarg: url, row.key_name_kwarg: API_KEY_VARIABLE}
            kwargs.pop("", None)
            if not row.provider:  # else Harbor imports litellm, for seconds, to look for one in the name
                model["skip_model_parsing"] = True
            return Wired(fields=model, kwargs=kwargs, env={API_KEY_VARIABLE: endpoint.key})
        case Wiring.HARBOR:
            connection = {"base_url": url, "model_api_key_name": API_KEY_VARIABLE}
            dialect = {"model_api_format": FORMATS[row.dialect]} if row.chooses_dialect else {}
            return Wired(fields={**model, **connection, **dialect}, env={API_KEY_VARIABLE: endpoint.key})
