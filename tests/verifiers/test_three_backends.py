"""One run file, three owners of the loop: the same turns give the same rewards, tokens, masks, groups and failures."""

import asyncio
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import compacting_agent
import numpy as np
import pytest
from npm_tokenizers import tokenizer_dir
from replay import Recorder, Replayer, ReplayRouter, Turns
from scripted_policy import Line, ScriptedEngine, turn
from scripted_router import new_run
from server_fakes import served as serving_router
from slime_stand_in import slime_args, unpacked
from trials import write_task
from verifiers_server import Served, env_config, served, task_data
from vllm_generate_fake import generate_fake

from dockyard.backends.slime import hooks
from dockyard.collect.open import open_pool
from dockyard.gateway.render.renderer import Renderer
from dockyard.rollout.plan import RolloutPlan
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.tasks.folder import load_tasks
from dockyard.types import Rollout

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]

GRADE = "[ -e /app/done ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n"
GROUP_SIZE = 2
KINDS = ("solve", "rewrite", "limit", "fail", "unbuildable")


@dataclass(frozen=True, slots=True, order=True)
class Attempted:
    """A rollout as each of the three reports it: what would be trained, its reward and why it failed."""

    cause: str
    reward: float | None
    segments: tuple[tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]], ...]
    """Ids, whether sampled, logprobs. Of a rollout that is lost nothing is trained: none."""


type Groups = dict[str, list[Attempted]]


class Policy:
    """What is said for each kind of task; of the rollouts that are to solve theirs, every other one gives up.

    No two turns are the same, so that a rollout that is made again from its first turn gets all its others.
    """

    def __init__(self) -> None:
        self._began, self._said = count(), count()

    def __call__(self, prompt: str) -> Line:
        kind = next((kind for kind in KINDS if f"kind: {kind}" in prompt), "rewrite")
        number = next(self._said)
        solve = turn(f"```bash\ntouch /app/done # {number}\n```", thought="Let me see.")
        if "exit code" not in prompt and compacting_agent.SUMMARY not in prompt:
            return turn(f"I give up. {number}") if kind == "solve" and next(self._began) % 2 else solve
        match kind:
            case "limit":
                return turn(f"```bash\ntrue # {number}\n```")
            case "fail":
                return RuntimeError("out of memory")
            case "rewrite" if compacting_agent.SUMMARY not in prompt:
                return turn(f"```bash\ntrue # compact {number}\n```", thought="Too long.")
            case _:
                return turn(f"All done. {number}", thought="That is all.")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen3"
    shutil.copytree(tokenizer_dir("qwen3"), folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> dict[str, Any]:
    """The run file."""
    for kind in KINDS:
        dockerfile = "FROM scratch\nRUN false\n" if kind == "unbuildable" else "FROM scratch\n"
        task = write_task(tmp_path / "tasks" / kind, GRADE, dockerfile)
        (task.path / "instruction.md").write_text(f"kind: {kind}\n")
    return {
        "model": {"name": str(model)},
        "tasks": {"train": tmp_path / "tasks"},
        "agent": {"name": compacting_agent.NAME},
        "gateway": {"max_calls": 4},
        "grpo": {"group_size": GROUP_SIZE, "tasks_per_step": len(KINDS)},
        "rollout": {"retries": 0},
    }


async def by_our_pool(run: RunDir, engine: Recorder) -> Groups:
    config = run.config
    plan = RolloutPlan(
        phase=step_phase(0),
        tasks=load_tasks(run.path.parent / "tasks"),
        group_size=GROUP_SIZE,
        temperature=1.0,
        seed=0,
        stream="a",
    )
    async with open_pool(config, run, engine, Renderer.load(Path(config.model.name), config.model.name)) as pool:
        groups = await pool.collect(plan, lambda _: None)
    return {group.task: sorted(map(told, group.rollouts)) for group in groups}


def told(rollout: Rollout) -> Attempted:
    segments = [
        (tuple(segment.token_ids.tolist()), tuple(segment.sampled.tolist()), tuple(segment.logprobs.tolist()))
        for segment in rollout.segments
        if segment.logprobs is not None and rollout.reward is not None
    ]
    cause = rollout.failure.cause if rollout.failure else ""
    return Attempted(cause, rollout.reward, tuple(sorted(segments)))


def by_slime(run: RunDir, model: Path, turns: Turns) -> Groups:
    with serving_router(ReplayRouter(turns=turns)) as router:
        args = slime_args(run.path, router.url, model, num_rollout=1)
        worker = hooks.worker_of(args)
        try:
            samples = unpacked(hooks.generate_rollout(args, 0, None).samples)
        finally:
            worker.close()
    recorded = {(item.rollout.task, item.rollout.attempt): item.rollout for item in run.read_rollouts(step_phase(0))}
    groups: Groups = {}
    for rollout_id in sorted({sample.rollout_id for sample in samples}):
        own = [sample for sample in samples if sample.rollout_id == rollout_id]
        rollout = recorded[own[0].label, rollout_id % GROUP_SIZE]
        lost = all(sample.remove_sample for sample in own)
        attempted = Attempted(
            rollout.failure.cause if rollout.failure else "",
            None if lost else own[0].reward,
            () if lost else tuple(sorted(map(in_full, own))),
        )
        groups.setdefault(own[0].label, []).append(attempted)
    return {task: sorted(group) for task, group in groups.items()}


def in_full(sample: Any) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]:
    """SLiME keeps masks and logprobs of the response alone: what comes before it was not sampled."""
    before = len(sample.tokens) - sample.response_length
    mask = [False] * before + [bool(one) for one in sample.loss_mask]
    logprobs = [0.0] * before + [float(np.float32(one)) for one in sample.rollout_log_probs]
    return tuple(sample.tokens), tuple(mask), tuple(logprobs)


async def by_verifiers(run: RunDir, turns: Turns) -> Groups:
    folder = str(run.path)
    async with (
        generate_fake(Replayer(Recorder(ScriptedEngine(Policy())), turns), failure_status=400) as vllm,
        served(env_config({"run_dir": folder}, {"run_dir": folder})) as server,
    ):
        tasks = load_tasks(run.path.parent / "tasks")
        made = [(task.name, seen(server, vllm.url, task.path)) for task in tasks for _ in range(GROUP_SIZE)]
        attempted = await asyncio.gather(*(episode for _, episode in made))
    groups: Groups = {}
    for (task, _), one in zip(made, attempted, strict=True):
        groups.setdefault(task, []).append(one)
    return {task: sorted(group) for task, group in groups.items()}


async def seen(server: Served, url: str, task: Path) -> Attempted:
    trace = await server.trace(url, task_data(task))
    branches = [
        (tuple(branch.token_ids), tuple(branch.sampled_mask), tuple(float(np.float32(one)) for one in branch.logprobs))
        for branch in trace.branches
        if trace.ok
    ]
    return Attempted(
        trace.info["harbor_env"]["cause"] or "", trace.reward if trace.ok else None, tuple(sorted(branches))
    )


async def test_recorded_turns_give_the_same_groups_under_all_three(
    settings: dict[str, Any], model: Path, tmp_path: Path
):
    runs = [new_run(tmp_path / name, **settings) for name in ("own", "slime", "prime-rl")]
    try:
        recorder = Recorder(ScriptedEngine(Policy()))
        own = await by_our_pool(runs[0], recorder)
        assert {task: [one.cause for one in group] for task, group in own.items()} == {
            "solve": ["", ""],
            "rewrite": ["", ""],
            "limit": ["model_limit"] * 2,
            "fail": ["engine_failed"] * 2,
            "unbuildable": ["environment_build"] * 2,
        }
        assert sorted(one.reward or 0.0 for one in own["solve"]) == [0.0, 1.0]
        assert [one.reward for one in own["limit"]] == [1.0, 1.0]
        assert [len(one.segments) for one in own["rewrite"]] == [2, 2]
        slime, prime_rl = recorder.turns.replay(), recorder.turns.replay()
        assert await asyncio.to_thread(by_slime, runs[1], model, slime) == own
        assert await by_verifiers(runs[2], prime_rl) == own
        assert slime.used_up
        assert prime_rl.used_up
    finally:
        for run in runs:
            run.close()
