#!/bin/bash
# engines/install.sh ENGINE FOLDER: installs real sglang or vllm for the CPU into FOLDER (its own virtual environment).
# About two minutes and 3 GB each. A finished install of the same requirements is left alone.
set -euo pipefail

engine=${1:?usage: engines/install.sh sglang|vllm FOLDER}
folder=${2:?usage: engines/install.sh sglang|vllm FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
[ -f "$here/$engine/requirements.txt" ] || { echo "unknown engine '$engine'; wanted sglang or vllm" >&2; exit 2; }

wanted=$(cat "$here/install.sh" "$here/$engine/requirements.txt" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$folder"
    mkdir -p "$folder"
    "${PYTHON:-python3.11}" -m venv "$folder"
    # The lists are complete and pinned, so nothing is resolved; what the engines' own metadata asks for GPUs stays out.
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$here/$engine/requirements.txt"
    echo "$wanted" > "$folder/installed"
fi
if [ "$engine" = sglang ]; then
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$packages/sgl_kernel"
    cp -r "$here/sglang/sgl_kernel" "$packages/"
fi
echo "$engine is installed in $folder"
