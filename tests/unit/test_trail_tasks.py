import asyncio
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from gateway_fakes import FakeEngine, Said
from trials import attempt_at, trial_runner

from dockyard.config import AgentConfig
from dockyard.rollout.shell import one_command
from dockyard.settings.load import load_run_config
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.generated import TRAIL_KINDS, write_trail_tasks
from dockyard.types import Rollout, Task

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

CONFIG = Path(__file__).parents[2] / "configs" / "multi_turn.toml"
AGENT = AgentConfig(name="shell", max_turns=5, kwargs={"commands": ["cat", "echo"]})
FREE = AgentConfig(name="shell", max_turns=5)
WAYS = {
    "a pattern": "cat */*.txt",
    "a substitution": "cat $(grep -o '[a-z]*/[a-z]*.txt' {first})",
    "a chain": "cat {first} && cat */*.txt",
    "several lines": "cat {first}\ncat */*.txt",
    "a search": "grep -rh . .",
    "a shell in the shell": "bash -c 'cat */*.txt'",
}
"""What shows the last note in one call in a free shell, from nothing but the first note's name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    write_trail_tasks(path, num_train=40, num_heldout=24, seed=3)
    return path


def of_three_calls(folder: Path) -> Task:
    return next(task for task in load_tasks(folder / "heldout") if task.kind == "three-calls")


def steps(task: Task) -> list[str]:
    """The commands of the solution."""
    return (task.path / "solution" / "solve.sh").read_text().splitlines()[2:]


def parts(task: Task) -> dict[str, str]:
    """The notes, the word and the file of a task of three calls."""
    first, second, write = steps(task)
    _, word, _, answer = write.split()
    return {"first": first.split()[1], "second": second.split()[1], "word": word, "answer": answer}


async def attempt(task: Task, commands: Sequence[str], folder: Path, agent: AgentConfig = AGENT) -> Rollout:
    engine = FakeEngine([Said(f"```bash\n{command}\n```") for command in commands])
    async with trial_runner(engine, folder, agent) as runner:
        return await runner.run(attempt_at(task))


@pytest.mark.real
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_the_solution_earns_1_and_doing_nothing_0(folder: Path, tmp_path: Path, agent: str, reward: float):
    tasks = load_tasks(folder / "heldout")[:2] + load_tasks(folder / "train")[:2]
    assert {task.kind for task in tasks} == set(TRAIL_KINDS)
    async with trial_runner(FakeEngine(), tmp_path, AgentConfig(name=agent)) as runner:
        rollouts = await asyncio.gather(*(runner.run(attempt_at(task, task.name)) for task in tasks))
    assert [rollout.reward for rollout in rollouts] == [reward] * 4


@pytest.mark.real
@pytest.mark.parametrize(("kind", "calls"), [("three-calls", 3), ("four-calls", 4)])
async def test_note_by_note_earns_1_in_as_many_calls_as_the_kind_says(
    folder: Path, tmp_path: Path, kind: str, calls: int
):
    task = next(task for task in load_tasks(folder / "train") if task.kind == kind)
    assert len(steps(task)) == calls
    rollout = await attempt(task, steps(task), tmp_path)
    assert rollout.reward == 1.0
    rollout = await attempt(task, steps(task)[:-1], tmp_path / "short")
    assert rollout.reward == 0.0


@pytest.mark.real
@pytest.mark.parametrize("way", WAYS)
async def test_no_single_call_shows_more_than_the_note_that_it_names(folder: Path, tmp_path: Path, way: str):
    task = of_three_calls(folder)
    look = WAYS[way].format(first=parts(task)["first"])
    [shown] = await outputs(task, look, tmp_path / "one")
    assert parts(task)["word"] not in shown
    [shown] = await outputs(task, look, tmp_path / "free", FREE)
    assert parts(task)["word"] in shown  # without the rule it is a way


async def outputs(task: Task, command: str, folder: Path, agent: AgentConfig = AGENT) -> list[str]:
    """What the model was shown of this command."""
    engine = FakeEngine([Said(f"```bash\n{command}\n```")])
    async with trial_runner(engine, folder, agent) as runner:
        await runner.run(attempt_at(task))
    [trajectory] = (folder / "trials").rglob("trajectory.json")
    return re.findall(r'"message": "(exit code .*)"', trajectory.read_text())


@pytest.mark.real
async def test_all_in_one_call_earns_nothing(folder: Path, tmp_path: Path):
    task = of_three_calls(folder)
    everything = "\n".join(steps(task))
    assert (await attempt(task, [everything], tmp_path / "one")).reward == 0.0
    assert (await attempt(task, [everything], tmp_path / "free", FREE)).reward == 1.0


@pytest.mark.real
async def test_a_copied_note_is_no_answer(folder: Path, tmp_path: Path):
    task = of_three_calls(folder)
    names = parts(task)
    copied = [f"cat {names['first']}", f"cat {names['second']} > {names['answer']}"]
    assert (await attempt(task, copied, tmp_path)).reward == 0.0


def test_a_note_is_named_only_by_the_one_before_it_and_the_answer_only_by_the_last(folder: Path):
    for task in [*load_tasks(folder / "train"), *load_tasks(folder / "heldout")]:
        *reads, write = steps(task)
        notes = [read.split()[1] for read in reads]
        _, word, _, answer = write.split()
        texts = [(task.path / "instruction.md").read_text()]
        texts += [(task.path / "environment" / "files" / note).read_text() for note in notes]
        for secret, teller in [*((note, place) for place, note in enumerate(notes)), (answer, len(notes))]:
            assert [place for place, text in enumerate(texts) if secret in text] == [teller]
        assert [place for place, text in enumerate(texts) if re.search(rf"\b{word}\b", text)] == [len(notes)]
        assert len(set(notes)) == len(notes) == int(task.kind == "four-calls") + 2


def test_heldout_tasks_share_no_word_and_no_phrasing_with_training(folder: Path):
    def said(side: str) -> tuple[set[str], set[str]]:
        words: set[str] = set()
        phrasings: set[str] = set()
        for task in load_tasks(folder / side):
            own = set(re.findall(r"\w+", " ".join(steps(task)))) - {"cat", "echo", "txt"}
            files = [task.path / "instruction.md", *(task.path / "environment" / "files").rglob("*.txt")]
            for file in files:
                phrasings.add(re.sub("|".join(rf"\b{word}\b" for word in own), "_", file.read_text()))
            words |= own
        return words, phrasings

    for seen, unseen in zip(said("train"), said("heldout"), strict=True):
        assert len(unseen) >= 6
        assert not seen & unseen


def test_the_examples_of_the_config_hold_no_word_of_a_heldout_task(folder: Path):
    examples = set(re.findall(r"\w+", str(tomllib.loads(CONFIG.read_text())["agent"]["kwargs"]["examples"])))
    for task in load_tasks(folder / "heldout"):
        own = set(re.findall(r"\w+", " ".join(steps(task)))) - {"cat", "echo", "txt"}
        assert not own & examples


def test_the_config_runs_one_command_a_turn():
    config = load_run_config(CONFIG, [])
    assert config.tasks.holds_out
    assert config.agent.kwargs["commands"] == AGENT.kwargs["commands"]
    assert config.agent.max_turns is not None
    assert config.agent.max_turns >= 4


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("cat one/two.txt", "cat one/two.txt"),
        ("\n  echo hello > out.txt\n", "echo hello > out.txt"),
        ("echo hello>out.txt", "echo hello > out.txt"),
        ('echo "two words" > "a file"', "echo 'two words' > 'a file'"),
        ("cat *", "cat '*'"),
        ("cat `cat one`", "cat '`cat' 'one`'"),
        ("echo $HOME", "echo '$HOME'"),
        ("cat ~/one", "cat '~/one'"),
        ("cat $(cat one)", None),
        ("cat one; cat two", None),
        ("cat one\ncat two", None),
        ("cat one | cat", None),
        ("cat one & cat two", None),
        ("echo one > two > three", None),
        ("echo one >> two", None),
        ("cat < one", None),
        ("cat <(cat one)", None),
        ("grep one two", None),
        ("/bin/cat one", None),
        ("X=1 cat one", None),
        ("echo 'one", None),
        ("> one", None),
        ("", None),
    ],
)
def test_one_command_is_its_words_and_nothing_that_a_shell_would_do_more(text: str, run: str | None):
    assert one_command(text, ["cat", "echo"]) == run
