"""Chat templates whose replies hold tool calls, for a tokenizer that knows their marks."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from gateway_fakes import tiny_tokenizer
from tokenizers import AddedToken

from dockyard.gateway.render.renderer import Renderer

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
XML = HERMES.replace(
    '\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n',
    "\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>\n",
)
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "limit": {"type": "integer"}}}
BASH = {"type": "function", "function": {"name": "bash", "description": "Runs it.", "parameters": PARAMETERS}}


@cache
def renderer_of(template: str) -> Renderer:
    folder = Path(mkdtemp(prefix="dockyard-tools-"))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<tool_call>", "</tool_call>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    return Renderer.load(folder)
