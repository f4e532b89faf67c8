"""The README of an exported model: what it is, how it was prompted in training, how to serve it."""

from collections.abc import Mapping
from typing import Any

_TRAINED = {
    "lora": "A LoRA adapter was trained over frozen weights.",
    "qlora": "A LoRA adapter was trained over frozen weights of 4 bits (NF4); what it was added to here has all bits.",
    "full": "All weights were trained.",
}
"""What each `trainer.method` did."""


def model_card(about: Mapping[str, Any], *, merged: bool, on_hub: bool, thinks: bool) -> str:
    """Markdown, with the head that the Hub reads."""
    kind = "A model" if merged else "A LoRA adapter"
    score = about["heldout_reward"]
    reached = f", with a mean reward of {score:.3f} on held-out tasks" if score is not None else ""
    return "\n".join(
        [
            "---",
            *([f"base_model: {about['base_model']}"] if on_hub else []),
            f"library_name: {'transformers' if merged else 'peft'}",
            "pipeline_tag: text-generation",
            "tags: [dockyard, reinforcement-learning]",
            "---",
            "",
            f"{kind} made by Dockyard {about['dockyard']}: `{about['base_model']}` after {about['step']} steps of "
            f"reinforcement learning with the agent `{about['agent']}`{reached}. {_TRAINED[about['method']]}",
            "",
            "## How it was prompted in training",
            "",
            *(f"- {line}" for line in _prompting(about, thinks=thinks)),
            "",
            "`dockyard.json` has the same for programs.",
            "",
            "## Serving it",
            "",
            *_serving(about, merged=merged),
            "",
        ]
    )


def _prompting(about: Mapping[str, Any], *, thinks: bool) -> list[str]:
    lines = [f"Sampled at temperature {about['temperature']:g}, without top-p, top-k or penalties."]
    if about["tool_calls"] == "preamble":
        lines.append(
            "Tools were told in the system text, because the chat template knows none; `dockyard serve` does that."
        )
    else:
        lines.append(f"Tools and tool calls were written as the chat template does (`{about['tool_calls']}`).")
    if about["chat_template_changed"]:
        lines.append("Thoughts of earlier turns stayed in the prompt. `chat_template.jinja` was changed to keep them.")
    elif thinks and not about["chat_template_keeps_thoughts"]:
        lines.append(
            "Thoughts of earlier turns stayed in the prompt. The chat template leaves them out; "
            "`dockyard serve` keeps them."
        )
    return lines


def _serving(about: Mapping[str, Any], *, merged: bool) -> list[str]:
    if merged:
        return ["    dockyard serve DIR     # prompts as in training", "    vllm serve DIR"]
    base = about["base_model"]
    template = " --chat-template DIR/chat_template.jinja" if about["chat_template_changed"] else ""
    return [
        f"    dockyard serve {base} --adapter DIR     # prompts as in training",
        f"    vllm serve {base} --enable-lora --lora-modules policy=DIR{template}",
    ]
