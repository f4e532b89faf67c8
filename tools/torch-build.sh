# To be read by install.sh (`. tools/torch-build.sh`), which sets $uv, $venv and $quiet: which build of torch is installed.
# PyPI's build for Linux brings several GB of CUDA libraries. A machine without a GPU gets PyTorch's CPU build instead,
# of the version in the lock file, or where no index has it PyPI's without those libraries that its import does not need.
# DOCKYARD_TORCH_INDEX names another index with CPU builds; `locked` installs what the lock file says on any machine.

cpu_index=${DOCKYARD_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
# What PyPI's torch imports without: it compiles for GPUs with the first, and loads the second when a GPU solves equations.
unneeded="triton nvidia-cusolver nvidia-nvtx nvidia-cuda-cccl cuda-bindings cuda-pathfinder"

has_gpu() {
    [ -e /proc/driver/nvidia ] || [ -e /dev/nvidia0 ] || [ -e /dev/nvidiactl ] || [ -e /usr/lib/wsl/lib/nvidia-smi ] ||
        command -v nvidia-smi >/dev/null 2>&1
}

wants_cpu_build() {
    [ "$cpu_index" != locked ] && [ "$(uname -s)" = Linux ] && ! has_gpu
}

torch_version() {
    sed -n '/^name = "torch"$/{n;s/^version = "\(.*\)"$/\1/p;}' uv.lock | head -n 1
}

cuda_packages() {
    sed -n 's/^name = "\(nvidia-.*\|cuda-.*\|triton\)"$/\1/p' uv.lock
}

# Prints an option for each package: each OPTION PACKAGE...
each() {
    option=$1
    shift
    for package in "$@"; do
        printf '%s %s ' "$option" "$package"
    done
}

# Any build of the locked version: torch is always installed last, so it is there when all that it needs is.
has_torch() {
    "$venv/bin/python" -c 'import importlib.metadata, sys
sys.exit(importlib.metadata.version("torch").partition("+")[0] != sys.argv[1])' "$(torch_version)" 2>/dev/null
}

install_torch_from() {
    "$uv" pip install --python "$venv/bin/python" --no-deps --default-index "$1" "torch==$(torch_version)" $2
}

# Short of patience with an index that does not answer, but not with a download that is under way.
index_has_torch() {
    UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 install_torch_from "$cpu_index" --dry-run >/dev/null 2>&1
}

torch_imports() {
    "$venv/bin/python" -c 'import torch' 2>/dev/null
}
