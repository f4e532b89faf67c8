"""`dockyard agents`: every agent with its wiring, for people and as data."""

import io
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dockyard.rollout.agents.rows import agent_names, row_of
from dockyard.rollout.agents.table import Dialect, Row

VALIDATED = Path(__file__).with_name("validated.json")
"""Written by the Docker test, and by nothing else: agent -> version, Harbor's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What is shown of one agent."""

    name: str
    usable: bool
    dialect: str
    runs: str
    executable: str
    wiring: str
    validated: str
    quirks: str


def list_agents(*, as_json: bool) -> str:
    """The table of agents, as JSON or for a terminal."""
    versions = validated_versions()
    listed = [_listed(name, row_of(name), versions.get(name, "-")) for name in agent_names()]
    if as_json:
        return json.dumps([asdict(agent) for agent in listed], indent=2)
    return _drawn(sorted(listed, key=lambda agent: (not agent.usable, agent.validated == "-", agent.name)))


def validated_versions() -> dict[str, str]:
    """The version of each agent that a scripted policy drove to reward 1.0 in Docker."""
    return {name: seen["version"] for name, seen in json.loads(VALIDATED.read_text()).items()}


def _listed(name: str, row: Row, validated: str) -> Listed:
    if row.refusal:
        return Listed(
            name=name,
            usable=False,
            dialect="-",
            runs="-",
            executable="-",
            wiring="-",
            validated="-",
            quirks=f"cannot be trained: {row.refusal}",
        )
    return Listed(
        name=name,
        usable=True,
        dialect=row.dialect,
        runs="-" if row.dialect is Dialect.NONE else "inside" if row.inside else "our process",
        executable=row.program.executable if row.program else "-",
        wiring=row.wiring,
        validated=validated,
        quirks=row.quirks,
    )


def _drawn(agents: list[Listed]) -> str:
    table = Table("agent", "dialect", "model calls", "in the image", "wiring", "validated", "quirks", box=None)
    for column in table.columns:
        column.overflow = "fold"
    for agent in agents:
        style = None if agent.usable else "dim"
        cells = (agent.name, agent.dialect, agent.runs, agent.executable, agent.wiring, agent.validated, agent.quirks)
        table.add_row(*cells, style=style)
    console = Console(file=io.StringIO(), width=max(120, shutil.get_terminal_size().columns))
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
