"""A Harbor agent for tests: the `shell` agent, which forgets all but the last words when the model says `compact`."""

from typing import Any

from dockyard.rollout.shell import API_KEY_VARIABLE, ShellAgent

NAME = f"{__name__}:CompactingAgent"
SUMMARY = "You have begun. Go on."


class CompactingAgent(ShellAgent):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, gateway_url="", **kwargs)
        self._url = f"{self._extra_env['OPENAI_BASE_URL']}/chat/completions"
        self._extra_env[API_KEY_VARIABLE] = self._extra_env["OPENAI_API_KEY"]

    def _record(self, reply: dict[str, Any]) -> str:
        said = super()._record(reply)
        if "compact" in said:
            self._history[1:] = [{"role": "user", "content": f"{SUMMARY} You said: {said}"}]
            self._thoughts.clear()  # they are found by place
        return said
