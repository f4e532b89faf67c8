"""Settings for every test, made before anything is imported: nothing calls home, and output stays plain."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

os.environ["HARBOR_TELEMETRY"] = "off"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would fetch its price list on import
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers warns when a process that used it forks
os.environ["MPLBACKEND"] = "Agg"
os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)

with suppress(ImportError):  # which is not installed beside verifiers
    from hypothesis import HealthCheck, settings

    # An example's 200 ms, and a second to make ten of them, are gone at once on a machine that others work on too.
    # The rest stays as Hypothesis has it here or, where CI is set, there.
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("busy", settings.get_profile(settings.get_current_profile_name()), **patient)
    settings.load_profile("busy")


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
