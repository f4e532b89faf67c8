"""What the gateway recorded, read again from disk: by its ids the same to the bit, by its words with known differences.

The policy cuts its words as no tokenizer would, so ids made from text are others wherever it speaks.
"""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gateway_fakes import FakeEngine, Said, tiny_model, tiny_renderer
from trials import skip_without_terminals, write_task

from dockyard.cli import main
from dockyard.collect.open import open_pool
from dockyard.config import RunConfig
from dockyard.convert.conversation import Converted
from dockyard.convert.read import read_trials
from dockyard.convert.sample_files import read_samples
from dockyard.convert.samples import groups_of
from dockyard.rollout.plan import RolloutPlan
from dockyard.run_dir.run import ROLLOUTS, RunDir
from dockyard.types import Finish, Rollout, Segment, Task

pytestmark = pytest.mark.filterwarnings("default", "ignore:.*checksum.*:DeprecationWarning")  # litellm has many

GRADE = '[ "$(cat /app/hello.txt)" = hi ] && echo 0.5 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
WRITE, LOOK = Said("```bash\necho hi > hello.txt\n```"), Said("I look:\n\n```bash\ncat hello.txt  nothing\n```\n")
SHELL = [WRITE, LOOK, Said("It is done.")]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "task", GRADE)


async def record(script: Sequence[Said], task: Task, size: int = 1, **settings: object) -> list[Rollout]:
    """Rollouts of a real run in `mine`, as the gateway recorded them."""
    config = RunConfig.model_validate({"tasks": {"source": "demo"}, "rollout": {"concurrency": 1}, **settings})
    with RunDir.create(Path("mine"), config) as run:
        async with open_pool(config, run, FakeEngine(script), tiny_renderer()) as pool:
            plan = RolloutPlan(phase=ROLLOUTS, tasks=[task], group_size=size, temperature=1.0, seed=0, stream="s")
            await pool.collect(plan, lambda _: None)
        return [recorded.rollout for recorded in run.read_rollouts(ROLLOUTS)]


def same(left: Segment, right: Segment, *, versions: bool = True) -> bool:
    names = ["token_ids", "sampled", "logprobs", *(["versions"] if versions else [])]
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def pieces(segment: Segment) -> list[tuple[bool, list[int]]]:
    """The messages to and from the model, in order."""
    edges = [0, *(np.flatnonzero(np.diff(segment.sampled)) + 1).tolist(), len(segment.sampled)]
    return [(bool(segment.sampled[a]), segment.token_ids[a:b].tolist()) for a, b in pairwise(edges)]


def differences(exact: Converted, text: Converted) -> Counter[str]:
    """How the ids made from text differ from those that were sampled, piece by piece."""
    found: Counter[str] = Counter()
    for left, right in zip(exact.rollout.segments, text.rollout.segments, strict=True):
        for (sampled, ids), (also, others) in zip(pieces(left), pieces(right), strict=True):
            assert sampled == also
            found[f"{'said' if sampled else 'told'}: {difference(ids, others)}"] += 1
    return found


def difference(ids: list[int], others: list[int]) -> str:
    words, other_words = (tiny_renderer().text(np.array(some, np.int32)) for some in (ids, others))
    if ids == others:
        return "same ids"
    if words == other_words:
        return "same text in other tokens"
    return "rebuilt" if meaning(words) and meaning(words) == meaning(other_words) else "other text"


def meaning(words: str) -> dict[str, object] | None:
    """Of a reply of terminus-2's: what it means, however it is written."""
    try:
        return {"task_complete": False} | json.loads(words.removesuffix("<|im_end|>"))
    except ValueError:
        return None


async def test_a_run_is_converted_to_the_segments_that_were_recorded(task: Task):
    recorded = await record([*SHELL, *SHELL[::-1]], task, size=2)
    for found, rollout in zip(read_trials(Path("mine"), tiny_renderer()), recorded, strict=True):
        assert found.exact
        assert (found.rollout.reward, found.rollout.task) == (rollout.reward, rollout.task)
        assert [same(*pair) for pair in zip(found.rollout.segments, rollout.segments, strict=True)] == [True]
    for name in ("s.parquet", "s.jsonl", "s.json"):
        assert main(["convert", "mine", "--tokenizer", str(tiny_model()), "--output", name]) == 0
        [group] = groups_of(read_samples(Path(name)))
        for read, rollout in zip(group.rollouts, recorded, strict=True):
            assert (read.reward, read.attempt) == (rollout.reward, rollout.attempt)
            assert [same(*pair) for pair in zip(read.segments, rollout.segments, strict=True)] == [True]


async def test_its_trials_are_a_job_whose_words_differ_from_it_only_in_how_they_are_cut_into_tokens(task: Task):
    [recorded] = await record(SHELL, task)
    [exact] = read_trials(Path("mine"), tiny_renderer())
    [text] = read_trials(Path("mine/trials"), tiny_renderer())
    assert (text.exact, text.rollout.reward, text.rollout.task) == (False, recorded.reward, recorded.task)
    assert differences(exact, text) == {"told: same ids": 3, "said: same text in other tokens": 3}


async def test_examples_of_the_agent_are_context_in_both(task: Task):
    agent = {"name": "shell", "kwargs": {"examples": [["Say hi.", "```bash\necho hi\n```"]]}}
    await record(SHELL, task, agent=agent)
    [exact] = read_trials(Path("mine"), tiny_renderer())
    [text] = read_trials(Path("mine/trials"), tiny_renderer())
    assert differences(exact, text) == {"told: same ids": 3, "said: same text in other tokens": 3}


async def test_a_turn_that_was_cut_is_the_one_thing_that_a_trajectory_does_not_tell(task: Task):
    cut = Said("```bash\necho hi > hello.txt\n```", finish=Finish.LENGTH)
    await record([cut, Said("Done.")], task)
    [exact] = read_trials(Path("mine"), tiny_renderer())
    [text] = read_trials(Path("mine/trials"), tiny_renderer())
    assert differences(exact, text) == {
        "told: same ids": 1,
        "said: other text": 1,  # the end of the turn counts as said
        "told: other text": 1,
        "said: same ids": 1,
    }


def say(*keystrokes: str, done: bool = False) -> Said:
    commands = [{"keystrokes": text, "duration": 0.5} for text in keystrokes]
    return Said(json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}))


TERMINUS = [say("echo hi > hello.txt\n"), say(done=True), say(done=True)]


@pytest.fixture
def _tmux():
    skip_without_terminals()


@pytest.mark.usefixtures("_tmux")
async def test_ids_that_terminus_2_kept_are_those_that_were_recorded(task: Task):
    agent = {"name": "terminus-2", "kwargs": {"collect_rollout_details": True}}
    [recorded] = await record(TERMINUS, task, agent=agent)
    [trial] = Path("mine/trials").iterdir()
    [by_result] = read_trials(trial, tiny_renderer())
    result = json.loads((trial / "result.json").read_text())
    result["agent_result"]["rollout_details"] = []
    (trial / "result.json").write_text(json.dumps(result))
    [by_trajectory] = read_trials(trial, tiny_renderer())
    for found in (by_result, by_trajectory):
        assert found.exact
        assert "turns_without_ids" not in found.notes
        pairs = zip(found.rollout.segments, recorded.segments, strict=True)
        assert [same(*pair, versions=False) for pair in pairs] == [True]


@pytest.mark.usefixtures("_tmux")
@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, {"told: same ids": 3, "said: rebuilt": 3}),
        ({"trajectory_config": {"raw_content": True}}, {"told: same ids": 3, "said: same text in other tokens": 3}),
    ],
)
async def test_the_words_of_terminus_2_are_rebuilt_unless_it_kept_them(
    task: Task, kwargs: dict[str, object], expected: dict[str, int]
):
    await record(TERMINUS, task, agent={"name": "terminus-2", "kwargs": kwargs})
    [exact] = read_trials(Path("mine"), tiny_renderer())
    [text] = read_trials(Path("mine/trials"), tiny_renderer())
    assert ("rebuilt_replies" in text.notes) == (not kwargs)
    assert differences(exact, text) == expected
