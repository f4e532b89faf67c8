"""`dockyard export`."""

from pathlib import Path

from dockyard.cli.args import DEBUG, Flag, Given, Verb
from dockyard.cli.terminal import say
from dockyard.errors import UsageError
from dockyard.verbs import needs_packages


def _export(given: Given) -> int:
    flags = given.flags
    if flags.step is not None and flags.best:
        raise UsageError("`--step` cannot be combined with `--best`", hint="remove one of them")
    with needs_packages("exporting"):
        from dockyard.trainer.export import ExportRequest, export
    wanted = ExportRequest(
        run=flags.run,
        output=flags.output,
        step=flags.step,
        best=flags.best,
        adapter_only=flags.adapter_only,
        overwrite=flags.overwrite,
        base=flags.base,
    )
    source = export(wanted)
    kind = "adapter" if flags.adapter_only else "model"
    say(f"{kind} of step {source.step}: {flags.output}")
    return 0


VERBS = (
    Verb(
        name="export",
        about="Write a trained policy as a folder that vLLM, transformers and the Hub accept: the adapter merged into "
        "its base model, or the full model that was trained, with the chat template used in training. The run may "
        "still be in progress.",
        act=_export,
        flags=(
            Flag("run", "the folder of a training run", {"metavar": "RUN_DIR", "type": Path}),
            Flag("--output", "the folder to write", {"metavar": "DIR", "type": Path, "required": True}),
            Flag("--step", "the checkpoint after this step (default: the latest)", {"metavar": "N", "type": int}),
            Flag("--best", "the checkpoint with the best held-out reward (needs `trainer.keep_best`)"),
            Flag("--adapter-only", "write the LoRA adapter instead of the full model"),
            Flag("--base", "the base model, if it is no longer where the run found it", {"metavar": "MODEL"}),
            Flag("--overwrite", "replace an earlier export"),
            DEBUG,
        ),
    ),
)
