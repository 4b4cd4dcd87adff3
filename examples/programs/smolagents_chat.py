"""An agent on smolagents, over Chat: one tool."""

import os
import subprocess
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a shell command.

    Args:
        command: The command.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
print(ToolCallingAgent(tools=[bash], model=model, max_steps=4).run(sys.argv[1]))
