"""Learning from rollouts that the policy did not draw: of a hosted endpoint, a finished job, a file of samples."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted_chat import Json, ScriptedChat, says
from tiny_policy import make_group, tiny_model_dir, tiny_policy
from trials import write_task

from dockyard.cli import main
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.trainer.learner import OffPolicy, measure
from dockyard.types import Group

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]

# The reward is the length of what was said, modulo 7.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for index in range(3):
        write_task(tmp_path / "tasks" / f"task-{index}", TEST_SH)


def settings(**more: object) -> list[str]:
    values = {
        "model.name": tiny_model_dir(),
        "model.device": "cpu",
        "trainer.lr": 0.01,
        "grpo.tasks_per_step": 2,
        "sampling.max_new_tokens": 24,
    }
    return [f"--{key}={value}" for key, value in {**values, **more}.items()]


def attempts(**more: object) -> list[str]:
    return settings(**{"tasks.train": "tasks", "agent.name": "reply_agent:ReplyAgent", "grpo.group_size": 4, **more})


def metrics(run: str) -> list[Json]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def longer_and_longer() -> ScriptedChat:
    chat = ScriptedChat(lambda _: says("ha" * (1 + len(chat.bodies) % 5)))
    return chat


def test_an_endpoint_without_token_ids_is_learnt_from_as_text(caplog: pytest.LogCaptureFixture):
    chat = longer_and_longer()
    with chat.at() as url:
        words = attempts(**{"engine.type": "openai", "engine.url": url, "steps": 2, "run_dir": "text"})
        assert main(["train", *words]) == 0
    said = caplog.text
    assert "step 2: off-policy by 1 updates: rollouts come from" in said
    assert "which gets no new weights" in said
    with RunDir.resume(Path("text")) as run:
        recorded = [item.rollout for item in run.read_rollouts(step_phase(0))]
    assert len(recorded) == 8
    assert all(rollout.exchanges and not rollout.segments for rollout in recorded)
    for line in metrics("text"):
        assert line["train/tokens"] > 0
        assert line["train/grad_norm"] > 0
        assert line["rollout/sampled_tokens"] > 0
        assert "gateway/trained_share" not in line  # of tokens that nobody counted


def test_a_resumed_run_reads_its_text_again():
    chat = longer_and_longer()
    with chat.at() as url:
        words = attempts(**{"engine.type": "openai", "engine.url": url, "steps": 1, "run_dir": "text"})
        assert main(["train", *words, "--trainer.save_every=1"]) == 0
        asked = len(chat.bodies)
        assert main(["train", "--resume=text", "--steps=2"]) == 0
        assert len(chat.bodies) == 2 * asked
    assert len(metrics("text")) == 2


@pytest.fixture
def job() -> Path:
    """A run of ours, whose rollouts are exact."""
    assert main(["rollout", *attempts(run_dir="job", **{"trainer.lr": 1e-6})]) == 0
    return Path("job")


def test_recorded_rollouts_are_learnt_from_for_some_epochs(job: Path, caplog: pytest.LogCaptureFixture):
    assert main(["train", *settings(run_dir="mine"), f"--from-job={job}", "--epochs=2"]) == 0
    said = caplog.text
    assert re.search(r"off-policy: these rollouts are not the policy's own\. Over [\d,]+ of their tokens", said)
    assert "their recorded logprobs are 0.000 nats off" in said  # drawn by these very weights
    lines = metrics("mine")
    assert [line["rollout/count"] for line in lines] == [8, 4, 8, 4]  # three tasks, two a step, twice
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert lines[-1]["train/logprob_mismatch"] > lines[0]["train/logprob_mismatch"]


def test_samples_of_a_job_teach_what_the_job_does(job: Path):
    assert main(["train", *settings(run_dir="from-job"), f"--from-job={job}"]) == 0
    for name in ("samples.parquet", "samples.jsonl", "samples.json", "samples.pt"):
        assert main(["convert", str(job), f"--tokenizer={tiny_model_dir()}", f"--output={name}"]) == 0
        assert main(["train", *settings(run_dir=f"from-{name}"), f"--from-job={name}"]) == 0
        assert [line["train/loss"] for line in metrics(f"from-{name}")] == pytest.approx(
            [line["train/loss"] for line in metrics("from-job")], abs=1e-6
        )


def test_a_killed_run_from_disk_goes_on_to_the_same_weights(job: Path):
    words = [*settings(**{"trainer.save_every": 1}), f"--from-job={job}", "--epochs=2"]
    assert main(["train", *words, "--run_dir=whole"]) == 0
    assert main(["train", *words, "--run_dir=cut"]) == 0
    for step in (2, 3, 4):  # as if it had been killed after the first
        Path(f"cut/checkpoints/step-{step:05}").rename(f"gone-{step}")
    Path(f"cut/rollouts/{step_phase(2)}.jsonl").unlink()
    assert main(["train", "--resume=cut"]) == 0
    adapter = "adapters/v00004/adapter_model.safetensors"
    assert Path("cut", adapter).read_bytes() == Path("whole", adapter).read_bytes()


def test_a_job_with_one_attempt_a_task_has_nothing_to_compare(job: Path, capsys: pytest.CaptureFixture[str]):
    file = Path("job/rollouts/rollouts.jsonl")
    lines = [line for line in file.read_text().splitlines() if json.loads(line)["attempt"] == 0]
    file.write_text("\n".join(lines) + "\n")
    assert main(["train", *settings(run_dir="mine"), "--from-job=job"]) == 1
    assert "no task in `job` has two rollouts with a reward" in capsys.readouterr().err
    assert not Path("mine/config.toml").exists()


def test_samples_of_another_tokenizer_are_refused(job: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["convert", str(job), f"--tokenizer={tiny_model_dir()}", "--output=s.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("s.jsonl").read_text().splitlines()]
    rows[3]["tokens"][0] = 150_000
    Path("s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", *settings(run_dir="mine"), "--from-job=s.jsonl"]) == 1
    expected = "sample 3 of `s.jsonl` was made for another model: id 150000 is not in this tokenizer's vocabulary"
    assert expected in capsys.readouterr().err


def test_an_epoch_is_an_update_even_where_one_step_takes_all(job: Path):
    def weights(epochs: int) -> bytes:
        words = [*settings(run_dir=f"epochs-{epochs}", **{"grpo.tasks_per_step": 8}), f"--epochs={epochs}"]
        assert main(["train", *words, "--from-job=job"]) == 0
        return Path(f"epochs-{epochs}/adapters/v{epochs:05}/adapter_model.safetensors").read_bytes()

    assert weights(1) != weights(3)


def test_a_run_files_tasks_and_steps_give_way_to_a_job(job: Path):
    Path("run.toml").write_text('steps = 7\n[tasks]\ntrain = "tasks"\nlimit = 2\n')
    assert main(["train", "run.toml", *settings(run_dir="mine"), "--from-job=job"]) == 0
    assert len(metrics("mine")) == 2


def test_a_job_does_not_go_with_skipped_training(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--from-job=job", "--skip-training"]) == 2
    assert "`--from-job` cannot be combined with `--skip-training`" in capsys.readouterr().err


@pytest.mark.parametrize("agent", ["oracle", "nop"])
def test_an_agent_that_samples_nothing_is_reported_and_not_trained(
    agent: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    words = ["--tasks.source=demo", f"--agent={agent}", "--tasks.num_train=4", "--run_dir=mine", "--json"]
    assert main(["train", *words]) == 0
    assert "samples no tokens: its rewards are reported, the update is skipped" in caplog.text
    assert json.loads(capsys.readouterr().out)["reward"] == (1.0 if agent == "oracle" else 0.0)


def test_the_distance_to_a_policy_is_what_its_logprobs_say():
    found = OffPolicy.of(np.log([0.5, 0.001]).astype(np.float32), np.array([np.log(0.25), np.nan], np.float32))
    assert found.unlikely == 0.5
    assert found.mismatch == pytest.approx(np.log(2))
    assert found.mean_logprob == pytest.approx((np.log(0.5) + np.log(0.001)) / 2)
    policy = tiny_policy()
    [group] = [make_group([1.0, 0.0])]
    measured = measure(policy, [group], 4096)
    assert measured is not None
    assert (measured.tokens, measured.mismatch) == (11, None)


def test_anchored_rollouts_are_compared_with_the_base_model_at_every_update():
    def losses(anchored: bool) -> Any:
        policy = tiny_policy(anchored=anchored)
        groups: list[Group] = [make_group([1.0, 0.0])]
        torch.manual_seed(0)
        return [policy.update(groups, 3).get("train/logprob_mismatch") for _ in range(3)]

    assert losses(False) == [None] * 3
    first, second, third = losses(True)
    assert first == pytest.approx(0.0, abs=1e-6)
    assert 0 < second < third
