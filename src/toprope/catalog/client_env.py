"""The environment variables in which programs look for their model: base URL, key and model name.

Two families: clients of the OpenAI API, whose base URL ends in `/v1`, and of the Anthropic API, which add it. The names
are those that the public clients and the agents built on them read (docs/how-to/bring-your-own-agent.md lists them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_HOLE = re.compile(r"\{(base_url|root_url|api_key|model|prompt|prompt_file|workdir)\}")


def client_env(root_url: str, key: str, model: str) -> dict[str, str]:
    """What a program needs to find its model, and to look for it nowhere else: no proxy stands between."""
    base_url = f"{root_url}/v1"
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": root_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": model,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with each `{name}` of ours replaced, once; every other brace stays as it is."""
    return _HOLE.sub(lambda hole: values[hole[1]], text)


def holes(text: str) -> set[str]:
    """The names of ours that stand in `text`."""
    return set(_HOLE.findall(text))
