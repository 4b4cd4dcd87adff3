"""An agent as one finds it: the public `openai` client, a tool, a loop. It has never heard of Toprope.

Where the model is, the client reads from OPENAI_BASE_URL, as it always does.
"""

import json
import sys

from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def use_tool(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"the arguments were not understood: {error!r}"


def answer(question: str, *, model: str = "policy", turns: int = 6) -> str:
    client = OpenAI()
    messages = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": question}]
    for _ in range(turns):
        reply = client.chat.completions.create(model=model, messages=messages, tools=[MULTIPLY], max_tokens=200)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = use_tool(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "I ran out of turns."


if __name__ == "__main__":
    print(answer(" ".join(sys.argv[1:]) or "How many minutes are there in 3 days?"))
