"""Advantage and reward functions of the user's: what is refused before the first rollout, and what stops a run."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gateway_fakes import tiny_renderer
from tool_templates import BASH, HERMES, renderer_of

from dockyard.backends.launch import Ignored, Supported
from dockyard.backends.prime_rl.launch import BACKEND as PRIME_RL
from dockyard.backends.slime.launch import BACKEND as SLIME
from dockyard.config import GRPOConfig, RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.rl.advantage import ADVANTAGES, has_signal, scored
from dockyard.rl.functions import check_functions
from dockyard.rl.pack import examples_of
from dockyard.rl.reward import finished_rollout, open_shaping
from dockyard.rl.statistics import rollout_metrics
from dockyard.rollout.plan import Attempt
from dockyard.run_dir.records import RecordedRollout, from_line, to_line
from dockyard.settings.load import load_run_config
from dockyard.types import (
    ASSISTANT,
    Blame,
    Exchange,
    Failure,
    Finish,
    Group,
    Message,
    Prompt,
    Rollout,
    Segment,
    Task,
    ToolCall,
)

ADVANTAGE = "def advantage(rewards: Sequence[float], rollouts: Sequence[Rollout]) -> Sequence[float]"
REWARD = "def reward(rollout: FinishedRollout) -> float"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(here: Path, code: str) -> None:
    (here / "my_functions.py").write_text(code)


def rollout_of(reward: float | None, shaped: float | None = None, *, attempt: int = 0, length: int = 3) -> Rollout:
    segment = Segment(
        token_ids=np.arange(1, length + 3, dtype=np.int32),
        sampled=np.array([False, False] + [True] * length),
        logprobs=None,
        versions=None,
    )
    return Rollout(
        task="t",
        kind="k",
        attempt=attempt,
        segments=(segment,),
        reward=reward,
        failure=None,
        seconds={"agent": 2.0},
        shaped_reward=shaped,
    )


def group_of(*rewards: float | None) -> Group:
    rollouts = [rollout_of(reward, attempt=index, length=3 + index) for index, reward in enumerate(rewards)]
    return Group(task="t", rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    ("setting", "name", "right"), [("advantage", "advantage", ADVANTAGE), ("reward", "reward", REWARD)]
)
@pytest.mark.parametrize("code", ["def {name}(): ...", "def {name}(a, b, c): ...", "{name} = 3"])
def test_a_wrong_signature_is_an_error_that_shows_the_right_one(
    here: Path, setting: str, name: str, right: str, code: str
):
    write(here, code.format(name=name))
    config = GRPOConfig.model_validate({setting: f"my_functions:{name}"})
    with pytest.raises(UsageError, match=f"`grpo.{setting}` is `my_functions:{name}`") as error:
        check_functions(config, remote=False)
    assert error.value.hint == f"define `{right}`"


@pytest.mark.parametrize("setting", ["advantage", "reward"])
def test_a_module_that_is_not_there_is_an_error(setting: str):
    with pytest.raises(UsageError, match=f"`grpo.{setting}` is `nowhere:f`, but there is no module `nowhere`"):
        check_functions(GRPOConfig.model_validate({setting: "nowhere:f"}), remote=False)


@pytest.mark.parametrize("value", ["sdt", "my", "my:", ":f", "my:f()", "std:", "my f:g"])
def test_what_is_neither_a_name_nor_a_reference_is_no_advantage(value: str):
    with pytest.raises(UsageError, match="it must be `std`, `mean`, `leave_one_out`, or `module:name`"):
        load_run_config(None, [f"--grpo.advantage={value}"])


@pytest.mark.parametrize("setting", ["loss", "reward"])
def test_what_is_no_reference_is_no_function(setting: str):
    with pytest.raises(UsageError, match=f"grpo.{setting}` on the command line is `grpo`; it must be `module:name`"):
        load_run_config(None, [f"--grpo.{setting}=grpo"])


def test_an_advantage_function_gets_the_rollouts_that_have_a_reward(here: Path):
    write(
        here,
        "def advantage(rewards, rollouts):\n"
        "    return [100 * rollout.attempt + reward for reward, rollout in zip(rewards, rollouts, strict=True)]",
    )
    config = GRPOConfig(advantage="my_functions:advantage")
    check_functions(config, remote=False)
    found = scored(group_of(1.0, None, 3.0), config)
    assert [(item.rollout.attempt, item.advantage) for item in found] == [(0, 1.0), (2, 203.0)]
    assert [example.advantage for example in examples_of([group_of(1.0, None, 3.0)], config, with_idle=True)] == [
        1.0,
        203.0,
    ]


def test_an_advantage_function_decides_which_groups_have_a_signal(here: Path):
    write(here, "def advantage(rewards, rollouts): return [len(r.segments[0].token_ids) for r in rollouts]")
    config = GRPOConfig(advantage="my_functions:advantage")
    assert has_signal(group_of(1.0, 1.0), config)
    assert not has_signal(group_of(1.0, 1.0), GRPOConfig())
    assert not has_signal(group_of(1.0, None), config), "there is nothing to compare"


def test_a_copy_of_a_built_in_advantage_gives_its_numbers(here: Path):
    write(
        here,
        "import statistics\n"
        "def advantage(rewards, rollouts):\n"
        "    mean = statistics.fmean(rewards)\n"
        "    return [(reward - mean) / (statistics.stdev(rewards) + 1e-6) for reward in rewards]",
    )
    group = group_of(0.0, 0.5, 2.0)
    mine = scored(group, GRPOConfig(advantage="my_functions:advantage"))
    assert [item.advantage for item in mine] == pytest.approx(ADVANTAGES["std"]([0.0, 0.5, 2.0], ()))


@pytest.mark.parametrize(
    "result",
    [
        *("[1.0]", "3", "None", "['a', 'b']", "[1.0, float('nan')]", "[1.0, float('inf')]"),
        *("{0: 0.5, 1: 0.5}", "{1.0, 2.0}", "'12'", "['1', '2']"),  # `float` would read each of them
    ],
)
def test_advantages_that_cannot_be_used_stop_the_run(here: Path, result: str):
    write(here, f"def advantage(rewards, rollouts): return {result}")
    with pytest.raises(
        DockyardError, match="`my_functions:advantage`, which returned `.*` for a group of task `t`"
    ) as e:
        scored(group_of(0.0, 1.0), GRPOConfig(advantage="my_functions:advantage"))
    assert e.value.hint == "it must return a list of 2 finite numbers, one for each rollout of the group"


def test_an_advantage_function_that_raises_is_named_with_the_line(here: Path):
    write(here, "def advantage(rewards, rollouts):\n    return rewards[99]")
    with pytest.raises(DockyardError, match="failed on a group of task `t`: IndexError: .*my_functions.py:2") as error:
        scored(group_of(0.0, 1.0), GRPOConfig(advantage="my_functions:advantage"))
    assert "--resume" in error.value.hint


def test_arrays_are_advantages_as_well(here: Path):
    write(here, "import numpy as np\ndef advantage(rewards, rollouts): return np.array(rewards) * 2")
    found = scored(group_of(0.0, 1.0), GRPOConfig(advantage="my_functions:advantage"))
    assert [item.advantage for item in found] == [0.0, 2.0]


def test_shaped_rewards_decide_the_advantages_and_the_signal():
    group = Group(task="t", rollouts=(rollout_of(1.0, 0.25), rollout_of(1.0, 0.75), rollout_of(None)))
    config = GRPOConfig(advantage="mean")
    assert [item.advantage for item in scored(group, config)] == [-0.25, 0.25]
    alike = Group(task="t", rollouts=(rollout_of(0.0, 0.5), rollout_of(1.0, 0.5)))
    assert has_signal(group, config)
    assert not has_signal(alike, config)


def test_the_overlong_penalty_is_subtracted_from_the_shaped_reward():
    config = GRPOConfig(advantage="mean", overlong="penalty", overlong_length=10, overlong_buffer=10)
    group = Group(task="t", rollouts=(rollout_of(0.0, 1.0, length=5), rollout_of(0.0, 1.0, length=10)))
    assert [item.advantage for item in scored(group, config)] == [0.25, -0.25]


def test_metrics_have_both_rewards_only_if_there_are_both():
    assert "reward/shaped_mean" not in rollout_metrics([rollout_of(1.0), rollout_of(0.0)])
    found = rollout_metrics([rollout_of(1.0, 0.5), rollout_of(0.0, 0.25), rollout_of(None)])
    assert (found["reward/mean"], found["reward/shaped_mean"]) == (0.5, 0.375)


def test_a_record_has_the_shaped_reward_beside_the_verified_one():
    line = to_line(RecordedRollout(phase="step-00000", group=0, rollout=rollout_of(1.0, 0.25)))
    read = from_line(line).rollout
    assert (read.reward, read.shaped_reward, read.training_reward) == (1.0, 0.25, 0.25)


def test_records_without_shaping_are_those_of_older_versions():
    line = to_line(RecordedRollout(phase="step-00000", group=0, rollout=rollout_of(1.0)))
    assert b"shaped_reward" not in line
    read = from_line(line).rollout
    assert (read.reward, read.shaped_reward, read.training_reward) == (1.0, None, 1.0)


def attempt_of(name: str = "step-00000-000-00") -> Attempt:
    task = Task(name="t", path=Path("t"), kind="k")
    return Attempt(name=name, task=task, group=0, index=0, seed=0, temperature=1.0)


def shaped_by(code: str, here: Path, rollout: Rollout) -> Rollout:
    write(here, code)
    shaping = open_shaping(GRPOConfig(reward="my_functions:reward"), tiny_renderer(), here / "trials")
    assert shaping is not None
    return shaping.shape(attempt_of(), rollout)


def test_a_run_without_a_reward_function_shapes_nothing(here: Path):
    assert open_shaping(GRPOConfig(), tiny_renderer(), here) is None


def test_a_reward_function_reads_what_the_verifier_left(here: Path):
    folder = here / "trials" / "step-00000-000-00" / "verifier"
    folder.mkdir(parents=True)
    (folder / "score.txt").write_text("0.125")
    shaped = shaped_by("def reward(rollout): return float(rollout.verifier_text('score.txt'))", here, rollout_of(1.0))
    assert (shaped.reward, shaped.shaped_reward) == (1.0, 0.125)


def test_files_outside_of_the_verifiers_folder_are_not_read(here: Path):
    folder = here / "trial" / "verifier"
    folder.mkdir(parents=True)
    (here / "secret").write_text("s")
    (folder / "link").symlink_to(here / "secret")
    finished = finished_rollout(rollout_of(1.0), tiny_renderer(), here / "trial")
    assert finished.verifier_text("link") == finished.verifier_text("../../secret") == ""
    assert finished.verifier_text("missing") == finished.verifier_text("") == ""


@pytest.mark.parametrize("result", ["None", "'much'", "'1.5'", "float('nan')", "-float('inf')", "[1.0]"])
def test_a_reward_that_is_no_number_stops_the_run(here: Path, result: str):
    with pytest.raises(DockyardError) as error:
        shaped_by(f"def reward(rollout): return {result}", here, rollout_of(1.0))
    assert "`grpo.reward` is `my_functions:reward`, which returned" in error.value.message
    assert "for rollout `step-00000-000-00` of task `t`" in error.value.message
    assert "--resume" in error.value.hint


def test_a_reward_function_that_raises_is_named_with_the_rollout(here: Path):
    with pytest.raises(DockyardError, match="ZeroDivisionError") as error:
        shaped_by("def reward(rollout):\n    return 1 / 0", here, rollout_of(1.0))
    assert "failed on rollout `step-00000-000-00` of task `t`" in error.value.message
    assert "my_functions.py:2" in error.value.message


def test_a_reward_function_sees_the_whole_rollout():
    renderer = tiny_renderer()
    asked = renderer.prompt(Prompt((Message("user", "what is this"),)))
    said = renderer.reply(Message(ASSISTANT, "a boat"), ())
    ids = np.concatenate([asked, said, asked, said])
    sampled = np.repeat([False, True, False, True], [len(asked), len(said), len(asked), len(said)])
    segment = Segment(token_ids=ids, sampled=sampled, logprobs=None, versions=None)
    failure = Failure(cause="agent_timeout", blame=Blame.POLICY, message="")
    rollout = Rollout(
        task="t", kind="k", attempt=2, segments=(segment,), reward=0.5, failure=failure, seconds={"agent": 3.0}
    )
    found = finished_rollout(rollout, renderer, Path("trial"))
    assert (found.task, found.kind, found.attempt, found.reward) == ("t", "k", 2, 0.5)
    assert (found.failure, found.cut_short, found.seconds) == ("agent_timeout", True, {"agent": 3.0})
    assert found.num_sampled == 2 * len(said)
    assert [reply.text for reply in found.replies] == ["a boat", "a boat"]
    assert found.text == renderer.transcript(rollout)
    assert found.tools == ()


def test_a_reward_function_sees_the_tools_of_a_text_rollout():
    call = ToolCall("1", "bash", {"command": "ls"})
    first = Exchange(
        prompt=Prompt((Message("user", "look"),)), reply=Message(ASSISTANT, "", calls=(call,)), finish=Finish.STOP
    )
    history = (Message("user", "look"), first.reply, Message("tool", "a.txt", call_id="1"))
    last = Exchange(prompt=Prompt(history), reply=Message(ASSISTANT, "one file"), finish=Finish.STOP, num_sampled=7)
    rollout = Rollout(task="t", kind="", attempt=0, segments=(), reward=1.0, failure=None, exchanges=(first, last))
    found = finished_rollout(rollout, tiny_renderer(), Path("trial"))
    assert [(tool.name, tool.arguments) for tool in found.tools] == [("bash", {"command": "ls"})]
    assert found.num_sampled == 7
    assert "tool: a.txt" in found.text
    assert found.text.endswith("assistant: one file")


@pytest.mark.parametrize("renderer", [renderer_of(HERMES), tiny_renderer()], ids=["hermes", "preamble"])
def test_a_reward_function_sees_the_tools_of_a_rollout_of_tokens(renderer: Renderer):
    prompt = renderer.prompt(Prompt((Message("user", "look"),), (BASH,)))
    call = ToolCall("1", "bash", {"command": "ls"})
    sampled = renderer.reply(Message(ASSISTANT, "I look.", calls=(call,)), (BASH,))
    segment = Segment(
        token_ids=np.concatenate([prompt, sampled]),
        sampled=np.repeat([False, True], [len(prompt), len(sampled)]),
        logprobs=None,
        versions=None,
    )
    rollout = Rollout(task="t", kind="", attempt=0, segments=(segment,), reward=1.0, failure=None)
    found = finished_rollout(rollout, renderer, Path("trial"))
    assert [(tool.name, tool.arguments) for tool in found.tools] == [("bash", {"command": "ls"})]
    assert [reply.text.strip() for reply in found.replies] == ["I look."]


def test_a_rollout_without_a_model_call_has_no_replies():
    rollout = Rollout(task="t", kind="", attempt=0, segments=(), reward=1.0, failure=None)
    found = finished_rollout(rollout, tiny_renderer(), Path("trial"))
    assert (found.replies, found.text, found.num_sampled) == ((), "", 0)


@pytest.mark.parametrize("setting", ["advantage", "loss"])
def test_a_policy_on_another_machine_refuses_functions_that_it_does_not_have(setting: str):
    config = GRPOConfig.model_validate({setting: "my_functions:f"})
    with pytest.raises(UsageError, match=f"`grpo.{setting}` is `my_functions:f`, but the policy is trained on another"):
        check_functions(config, remote=True)


def test_a_policy_on_another_machine_takes_built_in_advantages_and_rewards_from_here(here: Path):
    write(here, "def reward(rollout): return 1.0")
    check_functions(GRPOConfig(advantage="leave_one_out", reward="my_functions:reward"), remote=True)


@pytest.mark.parametrize("backend", [SLIME, PRIME_RL], ids=lambda backend: backend.name)
@pytest.mark.parametrize("setting", ["advantage", "loss", "reward"])
def test_other_backends_refuse_functions(backend: object, setting: str):
    config = RunConfig.model_validate({"grpo": {setting: "my_functions:f"}})
    assert isinstance(backend.support(f"grpo.{setting}", config), Ignored)  # pyright: ignore


def test_slime_takes_the_default_advantage():
    assert isinstance(SLIME.support("grpo.advantage", RunConfig()), Supported)


def test_settings_that_a_loss_of_the_users_may_read_are_not_refused():
    words = ["--tasks.train=x", "--grpo.correction=token", "--grpo.clip_low=0.1"]
    with pytest.raises(UsageError, match="`grpo.clip_low` has no effect when `grpo.correction` is `token`"):
        load_run_config(None, words)
    assert load_run_config(None, [*words, "--grpo.loss=my_functions:loss"]).grpo.clip_low == 0.1


def test_recorded_rollouts_are_not_shaped():
    words = ["--tasks.source=recorded", "--tasks.dataset=x", "--grpo.reward=my_functions:f"]
    with pytest.raises(UsageError, match="`grpo.reward` has no effect when `tasks.source` is `recorded`"):
        load_run_config(None, words)
