"""An agent on openai-agents, over Chat: one tool, the answer on the last lines."""

import asyncio
import os
import subprocess
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def bash(command: str) -> str:
    """Run a shell command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


async def main() -> None:
    model = OpenAIChatCompletionsModel(model=os.environ["OPENAI_MODEL"], openai_client=AsyncOpenAI())
    result = Runner.run_streamed(Agent(name="coder", model=model, tools=[bash]), sys.argv[1])
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
