"""Tools, choices and settings of a Responses request on their way to a Chat upstream: what it takes, what is named."""

from __future__ import annotations

import pytest

from toprope.dialects.chat_request import request_from_chat, request_to_chat
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.responses import request_from_responses

A = {"type": "function", "name": "a", "parameters": {}}
A_CHAT = {"type": "function", "function": {"name": "a", "parameters": {}}}
GRAMMAR = {"syntax": "lark", "definition": "start: /.+/"}
SH = {"type": "custom", "name": "sh", "description": "runs", "format": {"type": "grammar", **GRAMMAR}}
SH_CHAT = {
    "type": "custom",
    "custom": {"name": "sh", "description": "runs", "format": {"type": "grammar", "grammar": GRAMMAR}},
}
WEB = {"type": "web_search"}
CHOOSE_A = {"type": "function", "name": "a"}
CHOOSE_SH = {"type": "custom", "name": "sh"}
NAMED_A = {"type": "function", "function": {"name": "a"}}
NAMED_SH = {"type": "custom", "custom": {"name": "sh"}}


def sent(tools, choice, **more):
    body, lost = request_to_chat(request_from_responses({"input": "x", "tools": tools, "tool_choice": choice}), **more)
    return body.get("tools"), body.get("tool_choice"), lost


def allowed(*tools, mode="required"):
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def allowed_in_chat(*tools, mode="required"):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("tools", "choice", "goes", "lost"),
    [
        ([A, SH], CHOOSE_SH, None, ("tools.custom", "tool_choice.custom")),
        ([A, WEB], WEB, None, ("tools.web_search", "tool_choice.web_search")),
        ([A], {"type": "mcp", "server_label": "s"}, None, ("tool_choice.mcp",)),
        ([A, {"type": "namespace", "name": "n"}], {"type": "function", "name": "f"}, None, None),
        ([A, WEB], CHOOSE_A, NAMED_A, ("tools.web_search",)),
        ([A, WEB], NAMED_A, NAMED_A, ("tools.web_search",)),
        ([A, WEB], "required", "required", ("tools.web_search",)),
        ([A, WEB], {"type": "auto"}, {"type": "auto"}, ("tools.web_search",)),
        (
            [A],
            {"type": "function", "name": "none of mine"},
            {"type": "function", "function": {"name": "none of mine"}},
            (),
        ),
        ([A, SH], allowed(CHOOSE_A, CHOOSE_SH), allowed_in_chat(NAMED_A), ("tools.custom", "tool_choice.custom")),
        ([A, SH], allowed(CHOOSE_SH), "none", ("tools.custom", "tool_choice.custom")),
        ([A], allowed(CHOOSE_A, mode="auto"), allowed_in_chat(NAMED_A, mode="auto"), ()),
        ([A], allowed_in_chat(NAMED_A), allowed_in_chat(NAMED_A), ()),
        ([A], allowed(), allowed_in_chat(), ()),
    ],
)
def test_a_tool_choice_goes_with_its_tool_and_its_loss_is_named(tools, choice, goes, lost):
    told = ("tools.namespace", "tool_choice.function") if lost is None else lost
    assert sent(tools, choice) == ([A_CHAT], goes, told)


@pytest.mark.parametrize(
    ("choice", "lost"),
    [
        (CHOOSE_SH, ("tool_choice.custom",)),
        ("required", ("tool_choice.required",)),
        (allowed(CHOOSE_SH), ("tool_choice.custom",)),
        ("auto", ()),
        (None, ()),
    ],
)
def test_no_choice_is_left_where_no_tool_is(choice, lost):
    assert sent([SH, WEB], choice) == (None, None, ("tools.custom", "tools.web_search", *lost))


@pytest.mark.parametrize(
    ("choice", "goes"),
    [
        (CHOOSE_SH, NAMED_SH),
        ({"type": "custom", "name": "other"}, None),
        (allowed(CHOOSE_A, CHOOSE_SH), allowed_in_chat(NAMED_A, NAMED_SH)),
    ],
)
def test_an_upstream_that_takes_custom_tools_gets_them_in_its_own_spelling(choice, goes):
    tools, told, lost = sent([A, SH, WEB], choice, custom_tools=True)
    assert (tools, told) == ([A_CHAT, SH_CHAT], goes)
    assert lost == ("tools.web_search", *(() if goes else ("tool_choice.custom",)))


@pytest.mark.parametrize("shape", [None, {"type": "text"}, {"type": "grammar"}, {"type": "odd", "grammar": 5}])
def test_a_custom_tool_whose_format_is_no_grammar_keeps_it(shape):
    tools, _, _ = sent([{"type": "custom", "name": "sh", "format": shape}], None, custom_tools=True)
    told = {"type": "grammar", "grammar": {}} if shape == {"type": "grammar"} else shape
    assert tools == [{"type": "custom", "custom": {"name": "sh", **({} if told is None else {"format": told})}}]


def test_a_custom_tool_of_chat_is_that_of_responses():
    chat = request_from_chat({"messages": [{"role": "user", "content": "x"}], "tools": [A_CHAT, SH_CHAT]})
    assert chat.tools == request_from_responses({"input": "x", "tools": [A, SH]}).tools == (A, SH)


def test_a_choice_of_a_providers_tool_in_messages_goes_with_it():
    tools = [{"name": "a", "input_schema": {}}, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    sent_body, lost = request_to_chat(
        request_from_messages({**body, "tool_choice": {"type": "tool", "name": "web_search"}})
    )
    assert (sent_body["tools"], "tool_choice" in sent_body) == ([A_CHAT], False)
    assert lost == ("tools.web_search_20250305", "tool_choice.function")


@pytest.mark.parametrize(
    ("settings", "goes", "lost"),
    [
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}, ()),
        ({"reasoning": {"generate_summary": "auto"}}, {}, ()),
        ({"reasoning": {"max_tokens": 9, "summary": None}}, {"reasoning": {"max_tokens": 9}}, ()),
        (
            {"reasoning": {"effort": "low", "exclude": True, "summary": "auto"}},
            {"reasoning": {"effort": "low", "exclude": True}},
            (),
        ),
        (
            {"reasoning": {"effort": "low", "context": "auto", "mode": "pro"}},
            {"reasoning_effort": "low"},
            ("reasoning.context", "reasoning.mode"),
        ),
        ({"reasoning": "high"}, {}, ("reasoning",)),
        ({"text": {"verbosity": "low", "zz": 1, "nil": None}}, {"verbosity": "low"}, ("text.zz",)),
        ({"text": {"format": "json"}}, {}, ("text.format",)),
        ({"text": "json"}, {}, ("text",)),
        ({"text": {"format": {"type": "text"}}}, {}, ()),
    ],
)
def test_what_a_router_knows_of_thinking_goes_on_and_what_chat_has_no_place_for_is_named(settings, goes, lost):
    body, told = request_to_chat(request_from_responses({"input": "x", **settings}))
    assert {name: value for name, value in body.items() if name != "messages"} == goes
    assert told == lost


def test_names_of_losses_that_a_client_chose_are_short_and_can_be_written():
    tools = [A, {"type": "x" * 9_000}, {"type": "\ud800"}]
    _, lost = request_to_chat(
        request_from_responses(
            {"input": "x", "tools": tools, "text": {"y" * 9_000: 1}, "tool_choice": {"type": "\udfff"}}
        )
    )
    assert (len(lost), lost[1:3]) == (4, ("tools.\\ud800", "tool_choice.\\udfff"))
    assert max(map(len, lost)) == 120
