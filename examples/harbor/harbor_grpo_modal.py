"""GRPO with a GPU of Modal's: `modal run examples/harbor/harbor_grpo_modal.py --test`, or `python` for `modal run`.

With `--env docker` rollouts run in Docker here and the policy is on Modal; with `--env modal` or `daytona` the whole
run is there. `--resume RUN` continues one. Settings of `dockyard train` (`--section.key=value`) are taken too.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import modal
from harbor_core import arguments_of, train
from harbor_grpo_local import check, settings_of
from harbor_grpo_local import parser as local_parser

from dockyard.backends.modal.app import GPU, app
from dockyard.backends.modal.launch import train_on_modal, train_with_remote_policy
from dockyard.cli.terminal import configure_logging, show
from dockyard.errors import DockyardError, UsageError

OVER_THERE = ("modal", "daytona")
GO_WITH_RESUME = ("env", "gpu", "secrets", "resume")


def parser() -> argparse.ArgumentParser:
    """The arguments of harbor_grpo_local.py, and Modal's."""
    result = local_parser(__doc__)
    add = result.add_argument
    add("--gpu", default=GPU, help="as Modal names it, e.g. A100-80GB")
    add("--secrets", default="", help="names of Modal secrets, with commas between: HF_TOKEN, DAYTONA_API_KEY, ...")
    add("--resume", metavar="RUN", help="continue a run: its folder here, or with `--env modal` its name there")
    return result


def run(written: Sequence[str]) -> int:
    """Train; the exit code."""
    try:
        given, words = read(written)
        return there(given, words) if given.env in OVER_THERE else here(given, words)
    except DockyardError as error:
        show(error, debug=False)
        return error.exit_code


def read(written: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and settings of `dockyard train`. An error if some mean nothing."""
    arguments = parser()
    given, words = arguments.parse_known_args(written)
    check(arguments, given)
    refuse(given, words)
    return given, words


def refuse(given: argparse.Namespace, words: Sequence[str]) -> None:
    """What would have no effect."""
    if stray := [word for word in words if not word.startswith("--") or "=" not in word]:
        raise UsageError(f"`{stray[0]}` is no argument", hint="settings are written `--section.key=value`")
    written = [name for name, value in vars(given).items() if value != parser().get_default(name)]
    if given.resume and (lost := [name for name in written if name not in GO_WITH_RESUME]):
        message = f"`--{lost[0].replace('_', '-')}` does not go with `--resume`"
        raise UsageError(message, hint="a resumed run has its own settings; `--section.key=value` changes some")
    if given.openai_base_url:
        hint = "harbor_grpo_local.py trains with a server"
        raise UsageError("`--openai-base-url` has no effect: the policy's engine is on Modal", hint=hint)
    if given.env in OVER_THERE and any(word.startswith("--run_dir=") for word in words):
        raise UsageError("`--run_dir` has no effect: the run is in Modal's volume", hint="its name there is told")
    if given.skip_training and given.env not in OVER_THERE:
        hint = "`modal deploy examples/harbor/modal_openai_server.py`, then harbor_grpo_local.py --openai-base-url"
        raise UsageError("`--skip-training` needs no trainer on Modal", hint=hint)


def here(given: argparse.Namespace, words: Sequence[str]) -> int:
    """Loop and rollouts on this machine."""
    run_training = partial(train_with_remote_policy, gpu=given.gpu, secret_names=names(given.secrets))
    if given.resume:
        return train({}, [f"--resume={given.resume}", *words], run_training)
    return train(settings_of(given), words, run_training)


def there(given: argparse.Namespace, words: Sequence[str]) -> int:
    """Everything on Modal."""
    configure_logging(debug=False)
    settings = {} if given.resume else settings_of(given)
    name = Path(given.resume or settings.pop("run_dir")).name
    everything = [*arguments_of(settings), *words, *(["--skip-training"] if given.skip_training else [])]
    resume = given.resume is not None
    return train_on_modal(everything, name, resume=resume, gpu=given.gpu, secret_names=names(given.secrets))


def names(text: str) -> list[str]:
    """What stands between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


@app.local_entrypoint()
def main(*arguments: str) -> None:
    """What `modal run` begins with."""
    sys.exit(run(arguments))


if __name__ == "__main__":
    try:
        read(sys.argv[1:])  # before anything is built
        with modal.enable_output(), app.run():
            code = run(sys.argv[1:])
    except modal.exception.AuthError as error:
        reason = str(error).partition(".")[0]
        show(DockyardError(f"Modal does not let us in: {reason}", hint="`modal token new`"), debug=False)
        code = 1
    except DockyardError as error:
        show(error, debug=False)
        code = error.exit_code
    sys.exit(code)
