"""SLiME's own plugin contract tests, pointed at our hooks: `python tests/support/slime_contracts.py SLIME_CHECKOUT`.

Rollouts are real Harbor trials in sandboxes, behind a scripted router. Needs the development install, and a package
that SLiME imports: `pip install pylatexenc`.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from scripted_router import ScriptedRouter, new_run
from server_fakes import served

from dockyard.run_dir.run import RunDir

_HOOKS = {
    "ROLLOUT_FUNCTION_PATH": "generate_rollout",
    "EVAL_FUNCTION_PATH": "generate_rollout",
    "CUSTOM_GENERATE_FUNCTION_PATH": "generate",
    "DYNAMIC_SAMPLING_FILTER_PATH": "keep_informative",
    "DATA_SOURCE_PATH": "SlimeDataSource",
    "ROLLOUT_SAMPLE_FILTER_PATH": "even_out",
    "CUSTOM_REWARD_POST_PROCESS_PATH": "reward_post_process",
}
_ASYNC = {"ROLLOUT_FUNCTION_PATH": "generate_rollout_async", "EVAL_FUNCTION_PATH": "generate_rollout_async"}


def main(checkout: Path) -> int:
    """Twice: with the rollout function for `train.py`, and with that for `train_async.py`."""
    contracts = checkout / "tests" / "plugin_contracts"
    if not contracts.is_dir():
        sys.exit(f"error: `{contracts}` is not there\nhint: name a checkout of THUDM/slime")
    return max(_run(checkout, contracts, hooks) for hooks in (_HOOKS, _HOOKS | _ASYNC))


def _run(checkout: Path, contracts: Path, hooks: dict[str, str]) -> int:
    with TemporaryDirectory() as folder, served(ScriptedRouter()) as router, _new_run(Path(folder)) as run:
        environment = {
            **os.environ,
            **{f"SLIME_CONTRACT_{name}": f"slime_contract_hooks.{hook}" for name, hook in hooks.items()},
            "PYTHONPATH": os.pathsep.join(map(str, (checkout, checkout / "tests", Path(__file__).parent, *sys.path))),
            "SLIME_REPO": str(checkout),
            "CONTRACT_RUN": str(run.path),
            "CONTRACT_ROUTER": router.url,
            "HARBOR_TELEMETRY": "off",
        }
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", contracts, contracts]
        return subprocess.run(words, cwd=checkout, env=environment).returncode


def _new_run(folder: Path) -> RunDir:
    return new_run(
        folder / "run",
        tasks={"source": "demo", "num_train": 4, "num_heldout": 4},
        grpo={"group_size": 2, "tasks_per_step": 2},
        rollout={"max_staleness": 2, "max_lost_share": 1.0},  # one contract is about a batch without any response
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
