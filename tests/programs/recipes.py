"""The programs of `examples/programs`: where the version of each stands, and what each does to its history."""

from __future__ import annotations

from collections.abc import Mapping

EXITS: Mapping[str, str] = {
    # It ends when a command of the model prints a word of its own.
    "mini-swe-agent": """
def FINISH(call):
    name, parameter, _ = tool(call.request.request.tools)
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return ScriptedReply(text=ANSWER, calls=[ScriptedCall(name, json.dumps({parameter: done}))])
""",
    # It ends when the model calls a tool of its own with the answer.
    "smolagents": """
def FINISH(call):
    arguments = json.dumps({"answer": ANSWER})
    return ScriptedReply(text=ANSWER, calls=[ScriptedCall("final_answer", arguments)])
""",
}
"""What the policy says last to programs that do not end with an answer."""

REWRITES: Mapping[str, str] = {
    "pi-chat": "history_rewritten",
    "pi-responses": "history_rewritten",
    "opencode-chat": "history_rewritten",
    "opencode-responses": "history_rewritten",
    "qwen-code": "history_rewritten",
    "agents-sdk-chat": "history_rewritten",
    "langgraph-chat": "history_rewritten",
    "smolagents": "unrecorded_turn",
}
"""Programs that send the model's own turn back in other words, and why their rollouts are masked: the engine renders
other ids than were sampled, unless the next prompt is made of the recorded ids (`token_in`)."""

DISTRIBUTIONS: Mapping[str, str] = {
    "mini-swe-agent": "mini-swe-agent",
    "agents-sdk-chat": "openai-agents",
    "agents-sdk-responses": "openai-agents",
    "langgraph-chat": "langgraph",
    "langgraph-messages": "langchain-anthropic",
    "smolagents": "smolagents",
    "litellm-messages": "litellm",
}
"""Whose version is the program's, where it is a Python package. The others say it themselves (`--version`)."""
