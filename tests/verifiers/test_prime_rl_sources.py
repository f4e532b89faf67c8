"""What we write for Prime-RL's env servers, read by verifiers and our plug-in themselves."""

from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from prime_rl_documents import ROOT, documents

from dockyard.backends.prime_rl.plugin.environment import HarborEnvironmentConfig
from harbor_env import HarborTaskset


def sources(name: str) -> list[dict[str, Any]]:
    parts = documents()[name]["orchestrator"]
    return [source for split in ("train", "eval") if split in parts for source in parts[split]["source"]]


@pytest.mark.parametrize("name", documents())
def test_verifiers_reads_every_source_as_it_is_meant(name: str):
    for source in sources(name):
        read = vf.resolve_env_field({"env": source["env"]})["env"]
        assert isinstance(read, HarborEnvironmentConfig)
        dumped = read.model_dump(mode="json")
        assert holds(dumped, source["env"]), dumped


def holds(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return all(name in whole and holds(whole[name], value) for name, value in part.items())
    return whole == part


def test_the_tasks_that_ship_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    [source] = sources("harbor_8b")
    taskset = HarborTaskset(vf.resolve_env_field({"env": source["env"]})["env"].taskset)
    names = sorted(task.data.name or "" for task in taskset.load())
    assert names == sorted(path.name for path in Path("datasets/harbor_tasks").iterdir())
