#!/usr/bin/env bash
# Creates the virtual environment $1 and installs specdec into it, editable, with its compiled CPU kernels.
set -euo pipefail
cd "$(dirname "$0")"
venv=${1:-.venv}

# A python3.12 on the PATH may be an empty shim, so an interpreter counts only if it runs and can make environments.
find_python() {
    for name in ${PYTHON:-} python3.11 python3.12 python3 python3.13 python3.10; do
        for path in $(type -ap "$name" 2>/dev/null || true); do
            if "$path" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
                echo "$path"
                return
            fi
        done
    done
    echo "specdec needs Python 3.10 to 3.13 with the venv module; none was found on the PATH (set PYTHON=/path/to/python)" >&2
    exit 1
}

cuda=no
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then cuda=yes; fi

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    echo "creating $venv with $python"
    # A GPU host brings its own torch: let the environment see it.
    if [ $cuda = yes ]; then "$python" -m venv --system-site-packages "$venv"; else "$python" -m venv "$venv"; fi
fi
py=$venv/bin/python

if ! "$py" -c 'import torch, sys; v = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]); sys.exit(v < (2, 11))' 2>/dev/null; then
    echo "installing torch"
    if [ $cuda = yes ]; then
        "$py" -m pip install -q "torch>=2.11"
    else
        # The plain pin first: an extra index that cannot be reached costs over a minute per call.
        "$py" -m pip install -q -c constraints.txt torch ||
            "$py" -m pip install -q -c constraints.txt torch --extra-index-url https://download.pytorch.org/whl/cpu
    fi
fi
echo "installing specdec: its dependencies and the C++ kernels, some minutes"
"$py" -m pip install -q "setuptools>=77" wheel ninja
constraints=(); [ $cuda = yes ] || constraints=(-c constraints.txt)
"$py" -m pip install -q "${constraints[@]}" --no-build-isolation -e .
"$py" -m specdec.cli env
