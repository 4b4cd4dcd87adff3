"""The history of a Messages request as Responses items: turns of blocks become items, in order.

Left to others: the other fields of a request (`messages_request`), and the argument strings of calls, which a block
does not hold (`messages_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toprope.dialects.chat_history import argument_text
from toprope.dialects.chat_parts import Part, text_part
from toprope.dialects.messages_reply import signed_id
from toprope.dialects.pivot import without_token_fields
from toprope.wire.fields import refuse
from toprope.wire.messages import BILLING_NONCE, ROLES, Block
from toprope.wire.responses import Item

_IGNORED = frozenset(("cache_control", "citations", "caller"))
"""Fields of blocks that are about the provider's cache and search, or say again what the block is; they wander between
requests, and a part that changed so would not be the part that was seen."""
_PIVOT_KINDS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")


def items_from_system(system: Any) -> tuple[Item, ...]:
    """The system prompt as the first item, none where it says nothing.

    The billing line that Claude Code puts at its head is taken off: it differs in every request.
    """
    if system is None or system == "" or system == []:
        return ()
    if isinstance(system, str):
        content: Any = _without_nonce(system)
    else:
        content = parts_from_blocks(system, "input_text", "system")
        if content and isinstance(content[0].get("text"), str):
            head = _without_nonce(content[0]["text"])
            if head != content[0]["text"]:
                content[:1] = [{**content[0], "text": head}] if head else []
    return ({"type": "message", "role": "system", "content": content},) if content else ()


def _without_nonce(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_NONCE) else text


def items_from_turns(turns: Sequence[Any]) -> tuple[Item, ...]:
    """The entries of `messages` as items. Raises `BadRequest` naming the place that cannot be read."""
    items: list[Item] = []
    open_calls: list[str] = []
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if not isinstance(turn, dict):
            raise refuse(where, turn, "an object with a role")
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            raise refuse(f"{where}.role", role, "user, assistant, system or developer")
        if content is not None and not isinstance(content, str | list):
            raise refuse(f"{where}.content", content, "null, a string or a list of blocks")
        rest = {k: v for k, v in without_token_fields(turn).items() if k not in ("role", "content") and v is not None}
        if role == "assistant":
            made = _assistant(content, rest, f"{where}.content", f"h{index}")
            open_calls.extend(item["call_id"] for item in made if item["type"] == "function_call")
        elif isinstance(content, str):
            made = [{**rest, "type": "message", "role": role, "content": content}]
        else:
            made = _spoken(role, content or [], rest, f"{where}.content", open_calls)
        items += made
    return tuple(items)


def _assistant(content: Any, rest: Mapping[str, Any], where: str, id_seed: str) -> list[Item]:
    """One assistant turn: thoughts, texts and calls in their order; an empty one is an empty message."""
    if isinstance(content, str):
        parts = [text_part(content, "output_text")]
        return [{**rest, "type": "message", "role": "assistant", "content": parts}]
    items: list[Item] = []
    texts: list[Part] = []

    def say() -> None:
        if any(part.get("type") != "output_text" or part.get("text") for part in texts):
            items.append({**rest, "type": "message", "role": "assistant", "content": texts.copy()})
        texts.clear()

    for place, block in enumerate(content or ()):
        kind = _kind(block, f"{where}[{place}]")
        if kind in ("text", "image", "document"):
            texts += _parts(block, "output_text", f"{where}[{place}]")
            continue
        say()
        items.append(_authored(block, kind, f"{where}[{place}]", f"call_{id_seed}_{place}"))
    say()
    return items or [{**rest, "type": "message", "role": "assistant", "content": []}]


def _authored(block: Block, kind: str, where: str, fallback_id: str) -> Item:
    if kind == "tool_use":
        return _call(block, fallback_id)
    if kind == "thinking":
        text = block.get("thinking")
        parts = [{"type": "reasoning_text", "text": text}] if isinstance(text, str) and text else []
        item: Item = {**_rest(block, "thinking", "signature"), "type": "reasoning", "summary": [], "content": parts}
        signature = block.get("signature")
        own = signed_id(signature)
        if own is not None:
            item["id"] = own
        elif isinstance(signature, str) and signature:
            item["signature"] = signature
        return item
    if kind == "redacted_thinking":
        sealed: Item = {"type": "reasoning", "summary": [], "content": [], "encrypted_content": block.get("data")}
        return {**_rest(block, "data"), **sealed}
    if kind in _PIVOT_KINDS:
        raise refuse(f"{where}.type", kind, "a kind of content block")
    return without_token_fields({k: v for k, v in block.items() if k != "cache_control"})


def _call(block: Block, fallback_id: str) -> Item:
    """A tool_use block. Its argument string is the object written out, until the record of the call is asked."""
    call_id, name = block.get("id"), block.get("name")
    return {
        "type": "function_call",
        "call_id": call_id if isinstance(call_id, str) and call_id else fallback_id,
        "name": name if isinstance(name, str) else "",
        "arguments": argument_text(block.get("input") if block.get("input") is not None else {}),
    }


def _spoken(role: str, blocks: Sequence[Any], rest: Mapping[str, Any], where: str, open_calls: list[str]) -> list[Item]:
    """A turn that no model wrote: results of tools as their own items, what stands between them as messages."""
    items: list[Item] = []
    run: list[Part] = []

    def say() -> None:
        if run:
            items.append({**rest, "type": "message", "role": role, "content": run.copy()})
        run.clear()

    for place, block in enumerate(blocks):
        here = f"{where}[{place}]"
        if _kind(block, here) == "tool_result":
            say()
            items.append(_result(block, here, open_calls))
        else:
            run += _parts(block, "input_text", here)
    say()
    return items or [{**rest, "type": "message", "role": role, "content": []}]


def _result(block: Block, where: str, open_calls: list[str]) -> Item:
    call_id, content = block.get("tool_use_id"), block.get("content")
    if call_id in open_calls:
        open_calls.remove(call_id)
    elif not isinstance(call_id, str) or not call_id:
        call_id = open_calls.pop(0) if open_calls else "call_unknown"
    if content is not None and not isinstance(content, str | list):
        raise refuse(f"{where}.content", content, "null, a string or a list of blocks")
    output: Any = content or ""
    if isinstance(output, list):
        output = parts_from_blocks(output, "input_text", f"{where}.content")
    rest = _rest(block, "tool_use_id", "content", "is_error")
    item: Item = {**rest, "type": "function_call_output", "call_id": call_id, "output": output}
    return {**item, "is_error": True} if block.get("is_error") is True else item


def parts_from_blocks(blocks: Any, text_type: str, where: str) -> list[Part]:
    """Blocks of text, images and documents as parts; kinds that we do not know stay as they are."""
    if not isinstance(blocks, list):
        raise refuse(where, blocks, "null, a string or a list of blocks")
    return [part for place, block in enumerate(blocks) for part in _parts(block, text_type, f"{where}[{place}]")]


def _parts(block: Any, text_type: str, where: str) -> list[Part]:
    kind = _kind(block, where)
    if isinstance(block, str):
        return [text_part(block, text_type)]
    if kind == "image":
        image = {"type": "input_image", "image_url": _address(block, where), "detail": "auto"}
        return [{**_rest(block, "source"), **image}]
    if kind == "document":
        return _document(block, text_type, where)
    if kind != "text":
        return [{"type": kind, **_rest(block)}]
    rest = _rest(block)
    text = block.get("text")
    return [{**rest, **text_part(text if isinstance(text, str) else "", text_type)}]


def _document(block: Block, text_type: str, where: str) -> list[Part]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise refuse(f"{where}.source", source, "an object with a type")
    if source.get("type") == "text":
        return [text_part(str(source.get("data") or ""), text_type)]
    if source.get("type") == "content":
        inner = source.get("content")
        blocks = [{"type": "text", "text": inner}] if isinstance(inner, str) else inner
        for place, each in enumerate(blocks if isinstance(blocks, list) else ()):
            if isinstance(each, dict) and each.get("type") == "document":
                raise refuse(f"{where}.source.content[{place}].type", "document", "text or image")
        return parts_from_blocks(blocks, text_type, f"{where}.source.content")
    names = {"url": "file_url", "file": "file_id"}
    rest = _rest(block, "source", "title", "context")
    part: Part = {**rest, "type": "input_file", names.get(str(source.get("type")), "file_data"): _address(block, where)}
    if isinstance(block.get("title"), str):
        part["filename"] = block["title"]
    return [part]


def _rest(block: Block, *read: str) -> dict[str, Any]:
    """The fields of a block beside its type and those that are read, which whatever is made of it keeps."""
    return {
        name: value
        for name, value in without_token_fields(block).items()
        if name != "type" and name not in read and name not in _IGNORED and value is not None
    }


def _address(block: Block, where: str) -> str:
    """The source of an image or a document as one string: a data URL, a URL or a file's id."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type') or 'application/octet-stream'};base64,{source['data']}"
    if isinstance(source, dict) and kind in ("url", "file"):
        value = source.get("url" if kind == "url" else "file_id")
        if isinstance(value, str):
            return value
    shown = {k: v for k, v in source.items() if k != "data"} if isinstance(source, dict) else source
    raise refuse(f"{where}.source", shown, "a source of type base64 with data, url with url, or file with file_id")


def _kind(block: Any, where: str) -> str:
    if isinstance(block, str):
        return "text"
    if not isinstance(block, dict):
        raise refuse(where, block, "an object with a type")
    kind = block.get("type")
    if kind is None and isinstance(block.get("text"), str):
        return "text"
    if not isinstance(kind, str) or not kind:
        raise refuse(f"{where}.type", kind, "the kind of a content block")
    return kind
