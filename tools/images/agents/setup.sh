#!/bin/sh
# Runs inside the image: the environments find their Python, shells find the agents, and the files are there that
# Harbor's agents read because their installers leave them.
set -eu
echo /opt/python/lib >/etc/ld.so.conf.d/agents.conf
ldconfig

for venv in /opt/agents/aider /opt/agents/mini /opt/openhands-venv; do
    ln -sf /opt/python/bin/python3 "$venv/bin/python"
    sed -i 's|^home = .*|home = /opt/python/bin|' "$venv/pyvenv.cfg"
done
# openhands comes with the SDK it is built on, and Harbor's `openhands-sdk` looks here.
ln -s /opt/openhands-venv /opt/openhands-sdk-venv

for program in node qwen claude codex; do
    ln -s "/opt/agents/npm/node_modules/.bin/$program" "/usr/local/bin/$program"
done
ln -s /opt/agents/mini/bin/mini /opt/agents/mini/bin/mini-swe-agent /opt/agents/aider/bin/aider /usr/local/bin/

for home in /root /etc/skel; do
    mkdir -p "$home/.nvm" "$home/.local/bin"
    touch "$home/.nvm/nvm.sh"
    echo 'export PATH="$HOME/.local/bin:$PATH"' >"$home/.local/bin/env"
done
