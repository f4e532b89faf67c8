"""Settings for every test, made before anything is imported: nothing calls home, and output stays plain."""

import os
from functools import cache
from pathlib import Path

import pytest

os.environ["HARBOR_TELEMETRY"] = "off"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would fetch its price list on import
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers warns when a process that used it forks
os.environ["MPLBACKEND"] = "Agg"
os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders `agents`, `docker`, `real` and `train` are markers too."""
    for item in items:
        if item.path.parent.name in ("agents", "docker", "real", "train"):
            item.add_marker(item.path.parent.name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Tests that share a fixture of their module stay in one process: it may run a hundred rollouts."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if _has_module_fixture(config.rootpath / path) else nodeid

    return Scheduling(config, log)  # type: ignore[arg-type]


@cache
def _has_module_fixture(path: Path) -> bool:
    return 'scope="module"' in path.read_text()
