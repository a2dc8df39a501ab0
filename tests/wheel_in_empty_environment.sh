#!/bin/sh
# Install a built wheel in an empty environment outside the checkout and run the main job with it.
# Usage: wheel_in_empty_environment.sh PYTHON TORCH_REQUIREMENT WHEEL
set -eu
python=$1 torch=$2
wheel=$(cd "$(dirname "$3")" && pwd)/$(basename "$3")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$python" -m venv env
env/bin/pip install -q "$torch"
env/bin/pip install -q "$wheel"
export EXL3EVAL_CACHE="$folder/cache"
env/bin/exl3eval doctor
env/bin/exl3eval kld --variant int8-embed --out run
test -s run/receipt.json
test -s run/positions.parquet
env/bin/exl3eval kld --variant base --num-contexts 32 --positions 64 --json --quiet >base.json
env/bin/python - <<'CHECK'
import json

receipt = json.load(open("base.json"))
comparison = receipt["results"]["comparison"]
assert comparison["identical"] and comparison["paired"]["delta"]["mean"] == 0.0, comparison
run = json.load(open("run/receipt.json"))
assert run["identity"]["tokens"]["num_contexts"] == 136, run["identity"]["tokens"]
assert run["results"]["comparison"]["paired"]["delta"]["mean"] > 0
print("the wheel runs the main job")
CHECK
