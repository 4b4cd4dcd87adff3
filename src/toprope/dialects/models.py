"""The list of models in one body that the clients of all three dialects read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def models_reply(names: Sequence[str]) -> dict[str, Any]:
    """`GET /v1/models`: OpenAI's list and that of the Messages API at once; when a model was made is not known (0)."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "toprope",
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }
        for name in names
    ]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"object": "list", "data": data, "has_more": False, **ends}
