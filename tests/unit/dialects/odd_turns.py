"""Turns of an upstream that speaks Chat, with more than text, thought and calls of functions: plain, and as deltas."""

from __future__ import annotations

SIGNED = {"extra_content": {"google": {"thought_signature": "SIG"}}}
DETAILS = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "zzz"}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
DRAWN = {"type": "image_url", "image_url": {"url": "u", "format": "png"}}
VOICE = {"id": "audio_1", "data": "AAAA", "transcript": "so it is", "expires_at": 7}
CITED = {"type": "url_citation", "url_citation": {"url": "u", "title": "t", "start_index": 0, "end_index": 2}}

CITING = {"type": "text", "text": "so", "annotations": [CITED]}


def add(call_id="c0", function=None, **more):
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "add", "arguments": "{}", **(function or {})},
        **more,
    }


def custom(call_id="c0", said="ls", **more):
    return {"id": call_id, "type": "custom", "custom": {"name": "sh", "input": said}, **more}


def thinking(text):
    return {"type": "thinking", "thinking": [{"type": "text", "text": text}]}


def of_call(call, place=0):
    return {"tool_calls": [{"index": place, **call}]}


TURNS = {
    "a custom call": ({"content": None, "tool_calls": [custom()]}, [of_call(custom())]),
    "a custom call in pieces": (
        {"content": None, "tool_calls": [custom(said="ls ls")]},
        [
            of_call(custom(said="ls")),
            of_call({"custom": {"name": "sh", "input": " "}}),
            of_call({"custom": {"input": "ls"}}),
        ],
    ),
    "a custom call and a function's": (
        {"content": "so", "tool_calls": [add(), custom("c1"), custom("c1", "pwd")]},
        [{"content": "so"}, of_call(add()), of_call(custom("c1"), 1), of_call(custom("c1", "pwd"), 2)],
    ),
    "a signed call": ({"content": None, "tool_calls": [add(**SIGNED)]}, [of_call(add(**SIGNED))]),
    "a signed call before another": (
        {"content": "so", "tool_calls": [add(**SIGNED), add("c1")]},
        [{"content": "so"}, of_call(add(**SIGNED)), of_call(add("c1"), 1)],
    ),
    "a call whose signature comes late": (
        {"content": None, "tool_calls": [add(**SIGNED)]},
        [
            of_call(add()),
            of_call({"extra_content": {"google": {"thought_signature": "S"}}}),
            of_call({"extra_content": {"google": {"thought_signature": "IG"}}}),
        ],
    ),
    "a field of a function": (
        {"content": None, "tool_calls": [add(function={"note": "n"}), custom("c1", **SIGNED)]},
        [of_call(add(function={"note": "n"})), of_call(custom("c1", **SIGNED), 1)],
    ),
    "details beside calls": ({"content": None, "tool_calls": [add()], **DETAILS}, [DETAILS, of_call(add())]),
    "details beside a thought and calls": (
        {"content": "", "reasoning": "hm", "tool_calls": [add()], **DETAILS},
        [{"reasoning": "hm", **DETAILS}, {"content": ""}, of_call(add())],
    ),
    "details beside a thought": ({"content": None, "reasoning": "hm", **DETAILS}, [{"reasoning": "hm"}, DETAILS]),
    "details beside text": ({"content": "so", **DETAILS}, [DETAILS, {"content": "so"}]),
    "signed blocks": (
        {
            "content": None,
            "reasoning_content": "hm so",
            "thinking_blocks": [
                {"type": "thinking", "thinking": "hm ", "signature": "one"},
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "thinking", "thinking": "so", "signature": "two"},
            ],
            "tool_calls": [add()],
        },
        [
            {"reasoning_content": "hm", "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
            {"reasoning_content": " ", "thinking_blocks": [{"type": "thinking", "thinking": " "}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "one"}]},
            {"thinking_blocks": [{"type": "redacted_thinking", "data": "zzz"}]},
            {"reasoning_content": "so", "thinking_blocks": [{"type": "thinking", "thinking": "so"}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "two"}]},
            of_call(add()),
        ],
    ),
    "blocks of nothing but text": (
        {
            "content": "so",
            "reasoning_content": "hm",
            "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": None}],
        },
        [
            {"reasoning_content": "hm", "thinking_blocks": [{"type": "thinking", "thinking": "h"}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "m"}]},
            {"content": "so"},
        ],
    ),
    "thoughts of other shapes": (
        {"content": "so", "reasoning": {"text": "hm"}, "reasoning_content": ["hm"]},
        [{"reasoning": {"text": "hm"}}, {"reasoning_content": ["hm"]}, {"content": "so"}],
    ),
    "a refusal of another shape": (
        {"content": "so", "refusal": {"text": "no"}},
        [{"refusal": {"text": "no"}}, {"content": "so"}],
    ),
    "a thought in a part": (
        {"content": [thinking("hmm"), {"type": "text", "text": "so it is"}]},
        [{"content": [thinking("hm")]}, {"content": [thinking("m")]}, {"content": "so "}, {"content": "it is"}],
    ),
    "a thought in a part beside a custom call": (
        {"content": [thinking("hmm")], "tool_calls": [custom()]},
        [{"content": [thinking("hmm")]}, of_call(custom())],
    ),
    "text, a reference, text": (
        {
            "content": [
                {"type": "text", "text": "so "},
                {"type": "reference", "ids": [1]},
                {"type": "text", "text": "it is"},
            ]
        },
        [
            {"content": "s"},
            {"content": "o "},
            {"content": [{"type": "reference", "ids": [1]}]},
            {"content": "it "},
            {"content": "is"},
        ],
    ),
    "an image among parts": (
        {"content": [IMAGE, {"type": "text", "text": "so"}]},
        [{"content": [IMAGE]}, {"content": "so"}],
    ),
    "sound among parts beside a call": (
        {"content": [{"type": "audio", "audio": VOICE}], "tool_calls": [add()]},
        [{"content": [{"type": "audio", "audio": VOICE}]}, of_call(add())],
    ),
    "a text, then an image with more to it": (
        {
            "content": [
                {"type": "text", "text": "so"},
                {"type": "image_url", "image_url": {"url": "u", "format": "png"}},
            ]
        },
        [
            {"content": "s"},
            {"content": "o"},
            {"content": [{"type": "image_url", "image_url": {"url": "u", "format": "png"}}]},
        ],
    ),
    "images": ({"content": "so", "images": [IMAGE]}, [{"content": "so"}, {"images": [IMAGE]}]),
    "images with places": (
        {"content": "", "images": [{**IMAGE, "index": 0}, {**IMAGE, "index": 1}]},
        [{"content": "", "images": [{**IMAGE, "index": 0}]}, {"images": [{**IMAGE, "index": 1}]}],
    ),
    "nothing but an image": ({"content": None, "images": [IMAGE]}, [{"images": [IMAGE]}]),
    "images beside a thought and a call": (
        {"content": None, "reasoning_content": "hm", "tool_calls": [add()], "images": [IMAGE]},
        [{"reasoning_content": "hm"}, of_call(add()), {"images": [IMAGE]}],
    ),
    "sound": (
        {"content": None, "audio": VOICE},
        [
            {"audio": {"id": "audio_1", "transcript": "so "}},
            {"audio": {"id": "audio_1", "data": "AA"}},
            {"audio": {"transcript": "it is"}},
            {"audio": {"data": "AA"}},
            {"audio": {"expires_at": 7}},
        ],
    ),
    "citations": (
        {"content": "so", "annotations": [CITED, CITED]},
        [{"content": "so"}, {"annotations": [CITED]}, {"annotations": [CITED]}],
    ),
    "citations beside a thought and a refusal": (
        {"content": "so", "reasoning": "hm", "refusal": "no", "annotations": [CITED]},
        [{"reasoning": "hm"}, {"content": "so"}, {"annotations": [CITED]}, {"refusal": "no"}],
    ),
    "annotations of other forms": (
        {"content": "so", "annotations": [CITED, {"type": "file", "file": {"hash": "h"}}]},
        [{"content": "so"}, {"annotations": [CITED, {"type": "file", "file": {"hash": "h"}}]}],
    ),
    "citations of a text in parts": (
        {"content": [CITING, IMAGE]},
        [{"content": [CITING]}, {"content": [IMAGE]}],
    ),
    "citations of texts in parts and of the message": (
        {"content": [CITING, {"type": "text", "text": " it is"}], "annotations": [CITED]},
        [{"content": [CITING, {"type": "text", "text": " it is"}]}, {"annotations": [CITED]}],
    ),
    "citations beside a thought among the parts": (
        {"content": [thinking("hm"), {"type": "text", "text": "so"}], "annotations": [CITED]},
        [{"content": [thinking("hm")]}, {"content": "so"}, {"annotations": [CITED]}],
    ),
}
