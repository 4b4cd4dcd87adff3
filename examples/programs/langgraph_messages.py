"""An agent on LangGraph, over Messages, streamed: one tool."""

import os
import subprocess
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent


@tool
def bash(command: str) -> str:
    """Run a shell command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


agent = create_react_agent(ChatAnthropic(model=os.environ["ANTHROPIC_MODEL"], streaming=True), [bash])
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
