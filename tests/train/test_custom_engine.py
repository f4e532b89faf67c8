"""The example of an engine in `examples/extend` trains: its tokens are learned from, and it gets every new version."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_policy import tiny_model_dir
from trials import write_task

from dockyard.cli import main
from dockyard.run_dir.paths import RunPaths
from dockyard.run_dir.run import RunDir, step_phase

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
# The reward is the length of what was said, modulo 7: every group has a difference.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'
WATCHED = """
from engine import PlainEngine

returned, published = [], []

class Watched(PlainEngine):
    def __init__(self, setup, shift=0.0):
        super().__init__(setup)
        self.shift = shift

    async def generate(self, request):
        found = await super().generate(request)
        returned.append(found)
        found.logprobs[:] += self.shift
        return found

    async def publish(self, folder, version):
        await super().publish(folder, version)
        published.append((folder.name, version))

class Deaf(PlainEngine):
    async def publish(self, folder, version):
        pass

class OtherModel(PlainEngine):
    def __init__(self, setup):
        super().__init__(setup)
        weight = self._model.lm_head.weight.data
        weight[:] = weight.roll(1, 0)
"""
STEPS = 3

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    Path("watched.py").write_text(WATCHED)
    for index in range(3):
        write_task(tmp_path / "tasks" / f"task-{index}", TEST_SH)
    yield
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]
    for name in ("engine", "watched"):
        sys.modules.pop(name, None)


def settings(engine: str, **more: object) -> list[str]:
    values = {
        "run_dir": "run",
        "engine.type": engine,
        "steps": STEPS,
        "model.name": tiny_model_dir(),
        "model.device": "cpu",
        "tasks.train": "tasks",
        "agent.name": "reply_agent:ReplyAgent",
        "sampling.max_new_tokens": 16,
        "sampling.temperature": 0.8,
        "rollout.concurrency": 4,
        "grpo.group_size": 4,
        "grpo.tasks_per_step": 2,
        "trainer.lr": 0.01,
    }
    return [f"--{key}={value}" for key, value in {**values, **more}.items()]


def metrics() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_example_is_trained_with_token_by_token_and_gets_every_version(method: str):
    assert main(["train", *settings("watched:Watched", **{"trainer.method": method})]) == 0
    watched = sys.modules["watched"]
    assert [version for _, version in watched.published] == [0, 1, 2, 3]
    assert [folder for folder, _ in watched.published] == ["v00000", "v00001", "v00002", "v00003"]

    returned = {(tuple(found.token_ids), tuple(found.logprobs)) for found in watched.returned}
    with RunDir.resume(Path("run")) as run:
        for step in range(STEPS):
            segments = [s for item in run.read_rollouts(step_phase(step)) for s in item.rollout.segments]
            assert len(segments) == 8
            for segment in segments:
                assert segment.logprobs is not None
                assert segment.versions is not None
                drawn = segment.sampled
                assert (tuple(segment.token_ids[drawn]), tuple(segment.logprobs[drawn])) in returned
                assert set(segment.versions[drawn]) == {step}
    for line in metrics():
        assert line["train/tokens"] > 0
        assert line["train/grad_norm"] > 0
        assert line["train/logprob_mismatch"] < 1e-3
        assert line["train/mismatch_kl"] < 1e-5


def test_an_engine_that_ignores_new_weights_is_stopped_with_its_name(capsys: pytest.CaptureFixture[str]):
    assert main(["train", *settings("watched:Deaf", **{"rollout.retries": 0})]) == 1
    assert "`watched:Deaf.generate` sampled from version 0 although 1 was published" in capsys.readouterr().err


@pytest.mark.parametrize("more", ["--dry-run", "--json"])
def test_a_wrong_class_is_refused_before_the_model_is_looked_for(more: str, capsys: pytest.CaptureFixture[str]):
    Path("watched.py").write_text("class Mute:\n    def __init__(self, setup): ...")
    assert main(["train", *settings("watched:Mute", **{"model.name": "nowhere"}), more]) == 2
    shown = capsys.readouterr().err
    assert "`engine.type` is `watched:Mute`: it lacks close, generate, publish" in shown
    assert "`async def generate(self, request: GenerateRequest) -> Generation`" in shown


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"engine.type": "watched:Watched", "engine.kwargs.shift": -1.0}, "nats off on average from those of"),
        ({"engine.type": "watched:OtherModel"}, "`watched:OtherModel.generate` returned logprobs that are"),
    ],
)
def test_logprobs_of_another_model_are_refused_before_the_first_rollout(
    engine: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", *settings("", **engine)]) == 1
    assert says in capsys.readouterr().err
    assert not RunPaths(Path("run")).rollouts_of(step_phase(0)).exists()


def test_the_example_makes_and_evaluates_rollouts_with_an_adapter():
    assert main(["train", *settings("engine:PlainEngine", steps=1)]) == 0
    words = settings("engine:PlainEngine", run_dir="eval", **{"tasks.heldout": "tasks"})
    assert main(["eval", "--adapter=run/adapters/v00001", *words]) == 0
    assert main(["rollout", *settings("engine:PlainEngine", run_dir="rollouts")]) == 0
    versions = {}
    for folder, phase in (("eval", "eval"), ("rollouts", "rollouts")):
        with RunDir.resume(Path(folder)) as run:
            segments = [s for item in run.read_rollouts(phase) for s in item.rollout.segments]
            versions[folder] = {int(v) for s in segments if s.versions is not None for v in s.versions[s.sampled]}
            assert all(s.logprobs is not None and np.isfinite(s.logprobs[s.sampled]).all() for s in segments)
    assert versions == {"eval": {1}, "rollouts": {0}}
