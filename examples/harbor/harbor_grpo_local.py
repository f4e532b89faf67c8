"""GRPO on this machine: any Harbor agent on SWE-bench or C2Bug tasks, e.g. `harbor_grpo_local.py --test`."""

import argparse
import sys
from typing import Any

from harbor_core import NUM_TEST_TASKS, engine_settings, new_run_dir, positive, tasks_settings, train


def parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    """The arguments, with their defaults."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = result.add_argument
    add("--model", default="Qwen/Qwen2.5-Coder-7B-Instruct", help="a Hub name, a model folder, or smollm2-135m")
    add("--agent", default="qwen-coder", help="any Harbor agent; `dockyard agents` lists them")
    add("--env", default="docker", help="docker, modal, daytona, or any other Harbor environment; or sandbox")
    add("--data-source", default="swebench", choices=["swebench", "c2bug"])
    add("--dataset", help="of swebench: name@version, a folder of tasks, a file of rows, a Hugging Face dataset")
    add("--c2bug-dataset", help="of c2bug: a file of rows or a Hugging Face dataset")
    add("--num-rollouts", default=50, type=positive, help="tasks; each is tried --n-samples times")
    add("--n-samples", default=4, type=positive, help="rollouts of each task")
    add("--lr", default=1e-6, type=float)
    add("--kl-coef", default=0.001, type=float)
    add("--openai-base-url", help="a server to sample from; one that returns no token ids is trained from text")
    add("--openai-api-key", help="of that server; else $OPENAI_API_KEY")
    add("--test", action="store_true", help=f"{NUM_TEST_TASKS} tasks only")
    add("--skip-training", action="store_true", help="rollouts and rewards only")
    return result


def check(arguments: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse what means nothing together."""
    if given.data_source == "c2bug" and given.dataset:
        arguments.error("--dataset is of swebench; of c2bug it is --c2bug-dataset")
    if given.data_source == "swebench" and given.c2bug_dataset:
        arguments.error("--c2bug-dataset needs --data-source c2bug")
    if given.openai_api_key and not given.openai_base_url:
        arguments.error("--openai-api-key needs --openai-base-url")


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments as settings of a run."""
    num_tasks = NUM_TEST_TASKS if given.test else given.num_rollouts
    return {
        "run_dir": new_run_dir("runs", "harbor-grpo"),
        "model.name": given.model,
        "agent.name": given.agent,
        "environment.type": given.env,
        "grpo.group_size": given.n_samples,
        "grpo.kl_coef": given.kl_coef,
        "trainer.lr": given.lr,
        **tasks_settings(given.data_source, given.dataset, given.c2bug_dataset, num_tasks),
        **engine_settings(given.openai_base_url, given.openai_api_key),
    }


def main() -> int:
    """Train; the exit code."""
    arguments = parser()
    given = arguments.parse_args()
    check(arguments, given)
    return train(settings_of(given), ["--skip-training"] if given.skip_training else [])


if __name__ == "__main__":
    sys.exit(main())
