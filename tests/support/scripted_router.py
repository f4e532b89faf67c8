"""An SGLang router on loopback with a scripted policy, and a run folder for its clients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from gateway_fakes import Said, tiny, write_model
from server_fakes import FakeSGLang

from dockyard.backends.launch import write_task_list
from dockyard.config import RunConfig
from dockyard.run_dir.run import RunDir

type Script = Callable[[str], str | None]
"""From the prompt, as text, to what is said to it; None: the server fails."""


@cache
def model_folder() -> Path:
    """A small model without weights, as `find_model` wants it."""
    folder = write_model(Path(mkdtemp(prefix="dockyard-router-")))
    (folder / "config.json").write_text("{}")
    return folder


@dataclass(kw_only=True)
class ScriptedRouter(FakeSGLang):
    """Each drawn token has a logprob of its own. Every call is kept."""

    script: Script = lambda prompt: "All done."
    weight_version: str = "1"
    prompts: list[str] = field(default_factory=list)
    drawn: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    """Prompt, sampled ids, logprobs."""

    async def sample(self, adapter: str, prompt: list[int], **asked: Any) -> Any:
        if asked["limit"] == 1:  # whoever connects looks at the logprobs first
            return await super().sample(adapter, prompt, **asked)
        self.prompts.append(tiny().decode(prompt, skip_special_tokens=False))
        said = self.script(self.prompts[-1])
        if said is None:
            raise RuntimeError("as the script says")
        ids = Said(said).ids()[: asked["limit"]]
        first = sum(len(one) for _, one, _ in self.drawn)
        logprobs = [-(first + place + 1) / 1000 for place in range(len(ids))]
        self.drawn.append((prompt, ids, logprobs))
        reported = [np.full(tiny().get_vocab_size(), logprob) for logprob in logprobs]
        return ids, reported, "stop" if ids[-1] in asked["stop"] else "length"


def new_run(folder: Path, **settings: Any) -> RunDir:
    """A run as `dockyard backend slime` leaves it for the hooks. Held until it is closed."""
    wished = {"run_dir": folder, "model": {"name": str(model_folder())}, "engine": {"context_length": 4096}} | settings
    run = RunDir.create(folder, RunConfig.model_validate(wished))
    write_task_list(run)
    return run


def solutions(*folders: Path) -> dict[str, str]:
    """What each task is about -> the command that solves it."""
    tasks = [task for folder in folders for task in sorted(folder.iterdir())]
    return {
        (task / "instruction.md").read_text().strip(): (task / "solution" / "solve.sh").read_text().split("\n", 2)[2]
        for task in tasks
    }
