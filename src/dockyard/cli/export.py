"""`dockyard export`."""

import argparse
from pathlib import Path

from dockyard.cli.run_file import AddParser
from dockyard.cli.terminal import say
from dockyard.errors import DockyardError


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    parser = add_parser(
        "export",
        help="write a trained policy as a model folder",
        description="Write a trained policy as a folder that vLLM, transformers and the Hub take as it is: the adapter "
        "merged into its base model, or the whole model that was trained, with the chat template it was trained under. "
        "The run may still be going on.",
    )
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the folder of a training run")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="the folder to write")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", metavar="N", type=int, help="the checkpoint after this step (default: the latest)")
    which.add_argument("--best", action="store_true", help="what did best on held-out tasks (`trainer.keep_best`)")
    parser.add_argument("--adapter-only", action="store_true", help="write the LoRA adapter, not the whole model")
    parser.add_argument("--base", metavar="MODEL", help="the base model, if it is no longer where the run found it")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Write the folder and say what is in it."""
    try:
        from dockyard.trainer.export import ExportRequest, export
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dockyard"):
            raise
        raise DockyardError(
            f"exporting needs `{error.name}`, which is not installed", hint="`pip install 'dockyard[train]'`"
        ) from error
    wanted = ExportRequest(
        run=arguments.run,
        output=arguments.output,
        step=arguments.step,
        best=arguments.best,
        adapter_only=arguments.adapter_only,
        overwrite=arguments.overwrite,
        base=arguments.base,
    )
    source = export(wanted)
    kind = "adapter" if arguments.adapter_only else "model"
    say(f"{kind} of step {source.step}: {arguments.output}")
    return 0
