"""Stands in for `vllm serve`: `fake_vllm_command.py FOLDER [old | broken | loading] serve MODEL OPTIONS...`

Leaves the options it was started with in FOLDER/options.json. `old` is vLLM before 0.30; `broken` cannot start;
`loading` never comes to listen.
"""

import asyncio
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from server_fakes import FakeVLLM

folder, *words = sys.argv[1:]
kind, options = words[: words.index("serve")], words[words.index("serve") + 1 :]
if "old" in kind and "--enable-scale-out" in options:
    sys.exit("vllm: error: unrecognized arguments: --enable-scale-out")
if "broken" in kind:
    lines = ["INFO loading", "ValueError: Free memory on device (3/80 GiB) is less than desired GPU memory utilization"]
    sys.exit("\n".join([*lines, "RuntimeError: Engine core initialization failed. See root cause above."]))
Path(folder, "options.json").write_text(json.dumps(options))


async def serve() -> None:
    named = dict(pairwise(options))
    if "loading" not in kind:
        key = os.environ.get("VLLM_API_KEY")
        await FakeVLLM(models=(named["--served-model-name"],), port=int(named["--port"]), api_key=key).start()
    await asyncio.Event().wait()


asyncio.run(serve())
