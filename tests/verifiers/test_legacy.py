"""Environments as verifiers before 0.4 has them, which sample from a vLLM server of their own."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_fakes import Said, tiny
from scripted_router import model_folder
from server_fakes import FakeVLLM
from trials import write_task

from harbor_env import load_environment

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("verifiers.legacy") is None, reason="verifiers 0.4 has none any more"),
]

GRADE = "[ -e /app/done ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n"


@dataclass(kw_only=True)
class ScriptedVLLM(FakeVLLM):
    """Solves the task, then ends."""

    drawn: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    """Prompt, sampled ids, logprobs."""

    async def sample(self, adapter: str, prompt: list[int], **asked: Any) -> Any:
        if asked["limit"] == 1:  # whoever connects looks at the logprobs first
            return await super().sample(adapter, prompt, **asked)
        solved = "exit code" in tiny().decode(prompt)
        ids = Said("All done." if solved else "```bash\ntouch /app/done\n```").ids()
        logprobs = [-(place + 1) / 10 for place in range(len(ids))]
        self.drawn.append((prompt, ids, logprobs))
        return ids, [np.full(tiny().get_vocab_size(), logprob) for logprob in logprobs], "stop"


@pytest.mark.parametrize("dockerfile", ["FROM scratch\n", "FROM scratch\nRUN false\n"], ids=["solved", "unbuildable"])
async def test_a_rollout_has_its_turns_its_reward_or_an_error(dockerfile: str, tmp_path: Path):
    from verifiers.legacy.types import ClientConfig

    write_task(tmp_path / "tasks" / "one", GRADE, dockerfile)
    server = ScriptedVLLM(tokenizer=model_folder() / "tokenizer.json")
    await server.start()
    try:
        env = load_environment(
            tasks_dir=tmp_path / "tasks",
            environment_type="sandbox",
            vllm_base_url=f"{server.url}/v1",
            model_name=str(model_folder()),
            n_parallel_envs=2,
            max_turns=4,
            agent="shell",
            trials_dir=tmp_path / "trials",
        )
        client, columns = ClientConfig(api_base_url=f"{server.url}/v1"), ["trajectory", "error"]
        rollout = await env.run_rollout(env.get_dataset()[0], client, str(model_folder()), {}, state_columns=columns)
    finally:
        await server.stop()
    if "RUN" in dockerfile:
        assert "environment_build" in str(rollout["error"])
        assert rollout["trajectory"] == []
        return
    assert (rollout["error"], rollout["reward"]) == (None, 1.0)
    steps = [step["tokens"] for step in rollout["trajectory"]]
    assert [(one["prompt_ids"], one["completion_ids"]) for one in steps] == [one[:2] for one in server.drawn]
    assert [one["completion_logprobs"] for one in steps] == [pytest.approx(one[2]) for one in server.drawn]
    assert steps[1]["prompt_ids"][: len(steps[0]["prompt_ids"])] == steps[0]["prompt_ids"]
