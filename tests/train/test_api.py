"""Training and evaluation from Python, as a notebook would do it, with a tiny model in real sandboxes."""

from pathlib import Path

import pytest
from callers import Caller, from_anywhere, nothing_left_behind
from killable_runs import settings, write_tasks

import dockyard

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@from_anywhere
def test_a_notebook_trains_looks_at_the_results_and_evaluates(caller: Caller, tmp_path: Path):
    import matplotlib

    backend = matplotlib.get_backend()
    config = settings(tmp_path, steps=9)

    def notebook() -> dockyard.Run:
        return dockyard.train(config, steps=1, run_dir="mine", trainer={"lr": 1e-3})

    with nothing_left_behind():
        run = caller(notebook)
    assert isinstance(run, dockyard.Run)
    assert run.path == tmp_path / "mine"
    assert (run.config.steps, run.config.trainer.lr, run.config.seed) == (1, 1e-3, 3)
    assert run.metrics(as_="arrow")["step"].to_pylist() == [0]
    rollouts = run.rollouts("step-00000", tokens=True, as_="arrow")
    assert rollouts.num_rows == 8
    assert all(count > 0 for count in rollouts["num_sampled"].to_pylist())
    assert run.adapter == tmp_path / "mine/adapters/v00001"
    assert run.summary is not None
    assert run.summary["steps"] == 1
    assert matplotlib.get_backend() == backend

    write_tasks(tmp_path / "heldout", 2)
    evaluated = caller(lambda: dockyard.evaluate(config, adapter=run.adapter, tasks={"heldout": "heldout"}))
    assert isinstance(evaluated, dockyard.Run)
    assert evaluated.path == tmp_path / "runs/run-eval"
    assert evaluated.summary is not None
    assert (evaluated.summary["rollouts"], evaluated.summary["adapter"]) == (2, str(run.adapter))


def test_a_run_is_given_more_steps_from_python(tmp_path: Path):
    first = dockyard.train(settings(tmp_path, steps=1), run_dir="mine")
    again = dockyard.train(resume=first.path, steps=2)
    assert again.metrics(as_="arrow")["step"].to_pylist() == [0, 1]
    assert again.adapter == tmp_path / "mine/adapters/v00002"
