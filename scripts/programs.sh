#!/usr/bin/env bash
# Install the agent programs of others that tests/programs runs unchanged, into .programs: Python ones in py/ (a virtual
# environment apart from ours), those from npm in node/. Done once for the versions in requirements/programs*.txt.
# What cannot be had is left out, with one line that says so: its tests are skipped then, and fail in CI.
set -euo pipefail
cd "$(dirname "$0")/.."

digest=$(cat "$0" requirements/programs.txt requirements/programs-npm.txt | sha256sum | cut -d' ' -f1)
stamp=.programs/.stamp
if [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then exit 0; fi

echo "programs: installing agents of others into .programs (first time: two minutes, 2.5 GB)"
mkdir -p .programs/node
[ -x .programs/py/bin/python ] || .venv/bin/python -m venv .programs/py
if ! .programs/py/bin/python -m pip --disable-pip-version-check -qq install -r requirements/programs.txt; then
    echo "programs: pip could not install requirements/programs.txt; not tested: the programs in it" >&2
    exit 0
fi

if ! command -v npm >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    (apt-get update -qq && apt-get install -y -qq npm) >/dev/null 2>&1 || true
fi
if ! command -v npm >/dev/null; then
    echo "programs: no npm here (Debian: apt-get install npm); not tested: codex, pi, opencode, qwen-code" >&2
    exit 0
fi
# No scripts of packages run: what they ship is enough. Their engine fields are not ours to check: Node 22 comes along.
[ -f .programs/node/package.json ] || echo '{"private": true}' >.programs/node/package.json
if ! xargs npm install --prefix .programs/node --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel=error \
    <requirements/programs-npm.txt >/dev/null; then
    echo "programs: npm could not install requirements/programs-npm.txt; not tested: the programs in it" >&2
    exit 0
fi
echo "$digest" >"$stamp"
