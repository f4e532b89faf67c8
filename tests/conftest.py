"""Settings for every test, made before anything is imported: nothing calls home, and output stays plain."""

import os

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
