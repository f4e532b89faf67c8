"""SLiME's hooks over real Harbor trials in sandboxes, behind a scripted SGLang router.

`SLIME_REPO=DIR` runs the same on the classes of a SLiME checkout.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import Generator
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
from scripted_router import Script, ScriptedRouter, model_folder, new_run, solutions
from server_fakes import served
from slime_stand_in import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, slime_args, train_data, unpacked

from dockyard.backends.slime import hooks
from dockyard.backends.slime.worker import RolloutWorker, WorkerKey
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.run import EVAL, ROLLOUTS, RunDir
from dockyard.tasks.generated import write_demo_tasks

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

SMALL = {"grpo": {"group_size": 2, "tasks_per_step": 2}, "rollout": {"concurrency": 4, "retries": 0}}
FORKING: dict[str, Any] = {"agent": {"name": "forking_agent:ForkingAgent"}}


class Bench:
    """A router, a run on its tasks, and SLiME's arguments for both."""

    def __init__(self, folder: Path, router: ScriptedRouter) -> None:
        self.folder, self.router = folder, router
        write_demo_tasks(folder / "demo", num_train=4, num_heldout=4, seed=0)
        self.solutions = solutions(folder / "demo" / "train", folder / "demo" / "heldout")
        router.script = self.solve
        self.workers: list[RolloutWorker] = []
        self.runs: list[RunDir] = []

    def solve(self, prompt: str) -> str:
        """The solution of the task that the prompt is about, then the end."""
        if prompt.count("<|im_start|>assistant") > 1:
            return "All done."
        [command] = [command for text, command in self.solutions.items() if text in prompt]
        return f"```bash\n{command}```"

    def args(self, *, tasks: dict[str, Any] | None = None, num_steps: int = 8, **more: Any) -> Namespace:
        """Of a new run with these settings."""
        demo = {"train": self.folder / "demo" / "train", "heldout": self.folder / "demo" / "heldout"}
        run = new_run(self.folder / f"run-{len(self.runs)}", **{"tasks": tasks or demo, **SMALL, **more})
        self.runs.append(run)
        args = slime_args(run.path, self.router.url, model_folder(), num_rollout=num_steps)
        self.workers.append(hooks.worker_of(args))
        self.router.routing_keys.clear()  # of the check when it connected
        return args

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for run in self.runs:
            run.close()


@pytest.fixture
def bench(tmp_path: Path) -> Generator[Bench]:
    with served(ScriptedRouter()) as router:
        opened = Bench(tmp_path, router)
        try:
            yield opened
        finally:
            opened.close()


def every_other(script: Script) -> Script:
    """Every other rollout gives up at once."""
    began = count()

    def speak(prompt: str) -> str | None:
        first = prompt.count("<|im_start|>assistant") == 1
        return "I give up." if first and next(began) % 2 else script(prompt)

    return speak


def test_a_step_is_made_of_real_trials_and_its_samples_hold_what_was_drawn(bench: Bench):
    bench.router.script = every_other(bench.solve)
    args = bench.args()
    output = hooks.generate_rollout(args, 3, None)
    assert isinstance(output, RolloutFnTrainOutput)
    assert [len(group) for group in output.samples] == [2, 2]
    samples = unpacked(output.samples)
    assert sorted(sample.reward for sample in samples) == [0.0, 0.0, 1.0, 1.0]
    assert [(sample.group_index, sample.rollout_id) for sample in samples] == [(6, 12), (6, 13), (7, 14), (7, 15)]
    trained = [
        (token, logprob)
        for sample in samples
        for token, logprob, mask in zip(
            sample.tokens[-sample.response_length :], sample.rollout_log_probs, sample.loss_mask, strict=True
        )
        if mask
    ]
    drawn = [pair for _, ids, logprobs in bench.router.drawn for pair in zip(ids, logprobs, strict=True)]
    assert sorted(trained, key=lambda pair: -pair[1]) == [(token, pytest.approx(logprob)) for token, logprob in drawn]
    assert all(set(sample.weight_versions) == {"1"} for sample in samples)
    assert set(bench.router.routing_keys) == {f"step-00003-00{group}-0{index}" for group in (0, 1) for index in (0, 1)}
    assert output.metrics["reward/mean"] == 0.5
    assert bench.runs[0].read_metrics()[0]["rollout/count"] == 4


def test_a_batch_with_a_history_that_was_rewritten_is_nested_throughout(bench: Bench):
    args = bench.args(**FORKING)
    output = hooks.generate_rollout(args, 0, None)
    assert all(isinstance(rollout, list) for group in output.samples for rollout in group)
    samples = unpacked(output.samples)
    sizes = [len(rollout) for group in output.samples for rollout in group]
    assert set(sizes) <= {1, 2}
    assert len(samples) == sum(sizes) > len(sizes) == 4
    data = train_data(args, samples, hooks.reward_post_process)
    for rollout, tokens in zip(data["rollout_ids"], data["rollout_mask_sums"], strict=True):
        siblings = [
            mask for other, mask in zip(data["rollout_ids"], data["loss_masks"], strict=True) if other == rollout
        ]
        assert tokens == sum(map(sum, siblings)) > 0


def test_lost_rollouts_are_padding_that_no_mean_counts(bench: Bench):
    broken = bench.folder / "demo" / "train" / "train-000-write" / "environment" / "Dockerfile"
    broken.write_text("FROM debian:bookworm-slim\nRUN false\n")
    tasks = {"train": bench.folder / "demo" / "train"}
    args = bench.args(
        tasks=tasks, grpo={"group_size": 2, "tasks_per_step": 4}, rollout={"retries": 0, "max_lost_share": 0.25}
    )
    bench.router.script = every_other(bench.solve)
    samples = unpacked(hooks.generate_rollout(args, 0, None).samples)
    [first, second] = [sample for sample in samples if sample.label == "train-000-write"]
    for lost in (first, second):
        assert (lost.tokens, lost.response_length, lost.loss_mask) == ([0, 0], 1, [0])
        assert (lost.rollout_log_probs, lost.reward, lost.remove_sample) == ([0.0], 0.0, True)
        assert lost.status is Sample.Status.ABORTED
        assert lost.metadata["failure"]["blame"] == "infrastructure"
    raw, advantages = hooks.reward_post_process(args, samples)
    assert len(raw) == len(advantages) == 8
    assert [advantage for sample, advantage in zip(samples, advantages, strict=True) if sample.remove_sample] == [0, 0]
    assert not any(sample.remove_sample for sample in samples if sample.label != "train-000-write")


def test_a_step_that_loses_too_much_stops_slime(bench: Bench):
    for task in (bench.folder / "demo" / "train").iterdir():
        (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nRUN false\n")
    with pytest.raises(DockyardError, match="4 of 4 rollouts of step-00000 were lost to infrastructure"):
        hooks.generate_rollout(bench.args(), 0, None)


def test_each_evaluation_has_rollouts_of_its_own(bench: Bench):
    args = bench.args()
    before = hooks.generate_rollout(args, 0, None, evaluation=True)
    asked = len(bench.router.drawn)
    hooks.generate_rollout(args, 0, None)
    between = len(bench.router.drawn)
    after = hooks.generate_rollout_async(args, 0, None, evaluation=True)
    assert asked == len(bench.router.drawn) - between > 0
    for output in (before, after):
        assert isinstance(output, RolloutFnEvalOutput)
        heldout = output.data["heldout"]
        assert heldout["rewards"] == [1.0] * 4
        assert heldout["truncated"] == [False] * 4
        assert all(isinstance(sample, Sample) for sample in heldout["samples"])
    run = bench.runs[0]
    assert [len(run.read_rollouts(phase)) for phase in ("eval-00000", "eval-00001")] == [4, 4]


def test_a_run_without_held_out_tasks_says_so(bench: Bench):
    args = bench.args(tasks={"train": bench.folder / "demo" / "train"})
    with pytest.raises(DockyardError, match="no held-out tasks"):
        hooks.generate_rollout(args, 0, None, evaluation=True)


def test_what_is_recorded_is_not_made_again(bench: Bench):
    args = bench.args(**FORKING)
    made = unpacked(hooks.generate_rollout(args, 0, None).samples)
    bench.workers[0].close()
    asked = len(bench.router.drawn)
    again = RolloutWorker(WorkerKey.of(args))
    bench.workers.append(again)
    groups = again.collect(0)
    assert len(bench.router.drawn) == asked
    assert [rollout.reward for group in groups for rollout in group.rollouts] == [1.0] * 4
    assert sum(len(rollout.segments) for group in groups for rollout in group.rollouts) == len(made)


def test_later_steps_begin_early_but_never_too_early(bench: Bench):
    args = bench.args(rollout={"concurrency": 4, "retries": 0, "max_staleness": 2}, num_steps=3)
    hooks.generate_rollout_async(args, 0, None)
    trials = bench.runs[0].paths.trials
    assert _appears(trials, "step-00001-*")  # though nobody has asked for it yet
    hooks.generate_rollout_async(args, 1, None)
    assert _appears(trials, "step-00002-*")
    assert len(unpacked(hooks.generate_rollout_async(args, 2, None).samples)) == 4
    assert not list(trials.glob("step-00003-*"))  # there are three steps


def test_with_one_update_of_staleness_nothing_begins_before_slime_asks(bench: Bench):
    args = bench.args(rollout={"concurrency": 4, "retries": 0, "max_staleness": 1})
    hooks.generate_rollout_async(args, 0, None)
    assert {trial.name[:10] for trial in bench.runs[0].paths.trials.iterdir()} == {"step-00000"}


def _appears(folder: Path, pattern: str) -> bool:
    deadline = time.monotonic() + 600  # only against hanging
    while not list(folder.glob(pattern)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_filters_beside_our_own_rollout_function_are_refused(bench: Bench):
    args = bench.args()
    args.dynamic_sampling_filter_path = "dockyard.backends.slime.hooks.keep_informative"
    with pytest.raises(UsageError, match="no effect"):
        hooks.generate_rollout(args, 0, None)


async def test_slimes_own_loop_gets_rollouts_one_by_one_and_no_more_at_once_than_are_allowed(bench: Bench):
    args = await asyncio.to_thread(bench.args, **FORKING, rollout={"concurrency": 1, "retries": 0})
    groups = hooks.SlimeDataSource(args).get_samples(2)
    made = [list(await asyncio.gather(*(hooks.generate(args, sample, {}) for sample in group))) for group in groups]
    hooks.even_out(args, made)
    samples = unpacked(made)
    assert {(sample.group_index, sample.rollout_id) for sample in samples} == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert all(sample.reward == 1.0 for sample in samples)
    keys = [key for key, _ in groupby(bench.router.routing_keys)]
    assert len(keys) == len(set(keys)) == 4  # each rollout's calls in one go
    assert len(bench.runs[0].read_rollouts(ROLLOUTS)) == 4


async def test_an_evaluation_in_slimes_own_loop_counts_a_rollout_once(bench: Bench):
    args = await asyncio.to_thread(bench.args, **FORKING)
    sample = Sample(index=0, metadata={"task": "heldout-000-write"})
    made: Any = await hooks.generate(args, sample, {}, evaluation=True)
    assert isinstance(made, Sample)
    assert made.reward == 1.0
    assert len(bench.runs[0].read_rollouts(EVAL)) == 1


async def test_a_task_that_the_run_does_not_have_is_named(bench: Bench):
    args = await asyncio.to_thread(bench.args)
    with pytest.raises(DockyardError, match="no task `other`"):
        await hooks.generate(args, Sample(index=0, metadata={"task": "other"}), {})
