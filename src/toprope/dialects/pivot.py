"""The form between the dialects: Responses items, and one finished generation in them.

Every dialect's request becomes a `ResponsesRequest`, every engine's generation a `PivotReply`; each dialect renders a
reply from that. Left to others: one dialect's own spelling (`chat_request`, `chat_reply`, `responses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toprope.errors.tree import BadRequest
from toprope.wire.responses import TOKEN_FIELDS, FinishReason, Item, ResponsesRequest, Usage

_ID_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
CALLS = ("function_call", "custom_tool_call")
"""The kinds of items that are calls of the client's tools: of a function, or of one that takes any text."""
_TOKEN_FIELDS = frozenset((*TOKEN_FIELDS, "token_ids"))


@dataclass(frozen=True, slots=True)
class PivotReply:
    """One finished generation. `output` are Responses items in order, with ids, without token arrays.

    `reply_id` is the reply's own id without the dialect's prefix, `created` seconds since 1970. `tokens` is NeMo
    Gym's triple as plain lists for a caller that asked for it, `logprobs` a Chat `logprobs` object likewise.
    """

    output: tuple[Item, ...]
    finish_reason: FinishReason
    model: str
    usage: Usage
    reply_id: str
    created: int
    tokens: Mapping[str, Any] | None = None
    logprobs: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def without_token_fields(item: Item) -> Item:
    """`item` without token arrays that a client echoed back; the same object where it holds none.

    LiteLLM keeps unknown reply fields under `provider_specific_fields`; they are looked for there too.
    """
    nested = item.get("provider_specific_fields")
    hidden = nested if isinstance(nested, dict) and not _TOKEN_FIELDS.isdisjoint(nested) else None
    if _TOKEN_FIELDS.isdisjoint(item) and hidden is None:
        return item
    clean = {name: value for name, value in item.items() if name not in _TOKEN_FIELDS}
    if hidden is not None:
        clean["provider_specific_fields"] = {k: v for k, v in hidden.items() if k not in _TOKEN_FIELDS}
    return clean


def item_id(kind: str, reply_id: str, index: int) -> str:
    """The id of the output item at `index` of a reply, where the engine gave it none."""
    return f"{_ID_PREFIX.get(kind, 'item')}_{reply_id}_{index}"


def with_item_ids(output: Iterable[Item], reply_id: str) -> tuple[Item, ...]:
    """Output items as the record and the client get them: every one with an id, a status and no token arrays.

    Ids that the engine gave stay; missing ones are made from `reply_id` and the position. A call without a
    `call_id`, or with one that an earlier call of this reply has, gets one made the same way.
    """
    items: list[Item] = []
    calls: set[str] = set()
    for index, item in enumerate(output):
        item = dict(without_token_fields(item))
        kind = str(item.get("type"))
        if not item.get("id"):
            item["id"] = item_id(kind, reply_id, index)
        if kind in CALLS:
            if not item.get("call_id") or item["call_id"] in calls:
                item["call_id"] = f"call_{reply_id}_{index}"
            calls.add(item["call_id"])
        item.setdefault("status", "completed")
        items.append(item)
    return tuple(items)


def request_items(request: ResponsesRequest) -> tuple[Item, ...]:
    """All items of a request in prompt order: `instructions` as a leading system message, then `input`."""
    if not request.instructions:
        return request.input
    return ({"type": "message", "role": "system", "content": request.instructions}, *request.input)


_WORDS = frozenset(
    (
        "text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal",
        # thoughts and calls that libraries leave in the content of a turn, and what names a tool or quotes a text
        "thinking", "redacted_thinking", "reasoning", "tool_use", "tool_call", "function_call", "tool_reference",
        "search_result",
    )
)  # fmt: skip
"""The kinds of content parts that are words alone. Whatever else stands in content is taken for media: an engine knows
kinds that we do not (`video_url`, `image_embeds`), and what they become in a prompt is not text."""
_MEDIA_FIELDS = frozenset(
    (
        "image_url", "image_pil", "image_embeds", "image", "input_image", "images", "audio_url", "audio_embeds",
        "input_audio", "audio", "video_url", "input_video", "video", "videos", "file", "input_file",
    )
)  # fmt: skip
"""Fields that hold media in a part that names no kind (vLLM reads those), or beside the content of a message."""
_SEEN = ("image", "audio", "video", "file", "screenshot")


def has_media(request: ResponsesRequest) -> bool:
    """Whether any item holds an image, sound or file, so that its prompt ids stand for more than text."""
    return media_among(request.input)


_RESULTS = ("function_call_output", "custom_tool_call_output")


def media_among(items: Iterable[Item]) -> bool:
    """Whether any of these items holds an image, sound, film or file, or a part of a kind that we do not know.

    Items of kinds that no message is made of (`web_search_call`) have contents of their own kinds: there only what is
    called media counts.
    """
    for item in items:
        kind = item.get("type")
        content = item.get("output") if kind in _RESULTS else item.get("content")
        if kind == "message" or kind in _RESULTS:
            if isinstance(content, list) and any(map(_is_media, content)):
                return True
            if not _MEDIA_FIELDS.isdisjoint(item) and any(item.get(name) for name in _MEDIA_FIELDS):
                return True
        elif any(map(_is_called_media, (*_parts_of(content), *_parts_of(item.get("output"))))):
            return True
    return False


def _is_media(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    if kind is None:
        words = isinstance(part.get("text"), str) or isinstance(part.get("refusal"), str)
    else:
        words = isinstance(kind, str) and kind in _WORDS
    if not words or (not _MEDIA_FIELDS.isdisjoint(part) and any(part.get(name) for name in _MEDIA_FIELDS)):
        return True
    return kind == "search_result" and any(map(_is_media, _parts_of(part.get("content"))))


def _is_called_media(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and any(each in kind for each in _SEEN)


def _parts_of(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


_SHAPING = (
    "min_p", "typical_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "logit_bias",
    "bad_words", "allowed_token_ids",
)  # fmt: skip
"""What open engines take beside the fields of the pivot, and what changes the distribution that is sampled from."""
_LARGEST = 1 << 53  # beyond it a number is no setting, and not the same in every reader of JSON


def sampling_of(request: ResponsesRequest) -> dict[str, Any]:
    """The sampling parameters a request names; what it leaves out is the engine's default and is not invented.

    Of a list or an object, which may hold a vocabulary, it says the length alone.
    """
    names = ("temperature", "top_p", "top_k", "seed", "max_output_tokens")
    values = {name: getattr(request, name) for name in names}
    if request.stop:
        values["stop"] = list(request.stop)
    if request.tool_choice is not None:
        values["tool_choice"] = request.tool_choice
    for name in _SHAPING:
        told = request.extra.get(name)
        if isinstance(told, list | dict) and told:
            values[name] = f"of length {len(told)}"
        elif isinstance(told, int | float) and not isinstance(told, bool) and abs(told) <= _LARGEST:
            values[name] = told
    return {name: value for name, value in values.items() if value is not None}


def refuse_unsupported(body: Mapping[str, Any], fields: Iterable[tuple[str, str]]) -> None:
    """Refuse (400) the first of `fields` that the body sets; each is (name, why it cannot be honoured)."""
    for name, why in fields:
        if body.get(name) not in (None, False, "", [], {}):
            raise BadRequest(f"{name} is not supported: {why}", status=400)
