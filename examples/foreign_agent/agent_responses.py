"""The same agent over the Responses API. It has never heard of Toprope either."""

import json
import sys

from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "name": "multiply",
    "description": "Multiply two integers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
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
    items = [{"role": "user", "content": question}]
    for _ in range(turns):
        reply = client.responses.create(
            model=model, instructions="Use the tool.", input=items, tools=[MULTIPLY], max_output_tokens=200
        )
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        items += reply.output
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": use_tool(call.arguments)})
    return "I ran out of turns."


if __name__ == "__main__":
    print(answer(" ".join(sys.argv[1:]) or "How many minutes are there in 3 days?"))
