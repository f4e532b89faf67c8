"""Rollouts without training, from Python or the command line:

HarborRolloutGenerator(config=HarborConfig(model="Qwen/Qwen3-8B", agent="qwen-coder")).generate(dataset="tasks")
"""

import argparse
import sys

from dockyard import HarborConfig, HarborRolloutGenerator
from dockyard.errors import DockyardError

__all__ = ["HarborConfig", "HarborRolloutGenerator"]


def parser() -> argparse.ArgumentParser:
    """Describe the arguments and their defaults."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = HarborConfig()
    add = result.add_argument
    add("dataset", help="a folder of tasks, or name@version in Harbor's registry; with --existing-job a finished job")
    add("--existing-job", action="store_true", help="read a job that `harbor run` made")
    add("--model", default=defaults.model)
    add("--agent", default=defaults.agent)
    add("--env", dest="environment", default=defaults.environment)
    add("--base-url", default=None, help="a server to sample from")
    add("--n-tasks", default=None, type=int)
    add("--n-samples", default=defaults.n_samples, type=int)
    add("--n-concurrent", default=defaults.n_concurrent, type=int)
    return result


def main() -> int:
    """Make or read rollouts, and print one line per rollout."""
    given = vars(parser().parse_args())
    dataset, num_tasks, existing = given.pop("dataset"), given.pop("n_tasks"), given.pop("existing_job")
    generator = HarborRolloutGenerator(config=HarborConfig(**given))
    try:
        rollouts = generator.generate_from_existing_job(dataset) if existing else generator.generate(dataset, num_tasks)
    except DockyardError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return error.exit_code
    for rollout in rollouts:
        failure = rollout.failure.cause if rollout.failure else "-"
        print(f"{rollout.task}\t{rollout.attempt}\t{rollout.reward}\t{rollout.num_sampled}\t{failure}")
    return 0 if any(rollout.reward is not None for rollout in rollouts) else 1


if __name__ == "__main__":
    sys.exit(main())
