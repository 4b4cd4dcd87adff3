"""A loop of one's own on LiteLLM, over Messages: one tool."""

import json
import os
import subprocess
import sys

import litellm

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    reply = litellm.completion(
        model=f"anthropic/{os.environ['ANTHROPIC_MODEL']}", messages=messages, tools=[TOOL], max_tokens=1000
    )
    message = reply.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        command = json.loads(call.function.arguments)["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
print(message.content)
