"""The loss table is the code's own, and the page in the docs is made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.dialects.chat_request import request_from_chat, request_to_chat
from toprope.dialects.losses import RULES, fields_of, render_table
from toprope.dialects.messages_request import request_from_messages
from toprope.dialects.responses import request_from_responses
from toprope.errors.tree import BadRequest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "dialects.md"


def test_the_page_in_the_docs_is_the_table():
    assert PAGE.read_text(encoding="utf-8") == render_table()


@pytest.mark.parametrize("field", [name for name, _ in fields_of("responses -> pivot", "refused")])
def test_a_field_that_the_table_calls_refused_is_refused(field):
    body = {"input": [{"type": field, "id": "x"}]} if field == "item_reference" else {"input": "x", field: "x"}
    with pytest.raises(BadRequest, match=field):
        request_from_responses(body)


@pytest.mark.parametrize("field", [name for name, _ in fields_of("pivot -> chat", "dropped") if name.isidentifier()])
def test_a_field_that_the_table_calls_dropped_never_reaches_a_chat_upstream(field):
    body, _ = request_to_chat(request_from_responses({"input": "x", field: "x"}))
    assert field not in body


@pytest.mark.parametrize(
    "field", [name for name, _ in fields_of("messages -> pivot", "dropped") if name.replace("_", "").isalpha()]
)
def test_a_field_of_the_messages_provider_alone_goes_nowhere(field):
    body = {"messages": [{"role": "user", "content": "x"}], field: {"a": 1}}
    request = request_from_messages(body)
    assert request == request_from_messages({k: v for k, v in body.items() if k != field})


@pytest.mark.parametrize("field", ["metadata", "min_p", "never_heard_of"])
def test_a_field_of_a_messages_body_that_the_table_does_not_name_passes_through(field):
    body = {"messages": [{"role": "user", "content": "x"}], field: {"a": 1}}
    assert request_from_messages(body).extra[field] == {"a": 1}


@pytest.mark.parametrize("field", ["top_logprobs", "service_tier", "min_p", "chat_template_kwargs", "never_heard_of"])
def test_a_field_that_the_table_does_not_name_passes_through(field):
    ways = ("chat -> pivot", "responses -> pivot", "pivot -> chat")
    assert all(rule.field != field for rule in RULES if rule.way in ways)
    from_responses, _ = request_to_chat(request_from_responses({"input": "x", field: {"a": 1}}))
    from_chat, _ = request_to_chat(request_from_chat({"messages": [{"role": "user", "content": "x"}], field: {"a": 1}}))
    assert from_responses[field] == from_chat[field] == {"a": 1}
