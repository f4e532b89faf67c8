"""Settings for tests with torch, made before anything is imported."""

import os
from collections.abc import Iterator
from tempfile import mkdtemp

import pytest
import torch

os.environ["TRACKIO_DIR"] = mkdtemp(prefix="dockyard-trackio-")  # read on import, which other libraries do too


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads only wait for each other in a model as small as ours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
