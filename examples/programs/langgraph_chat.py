"""An agent on LangGraph, over Chat: one tool."""

import os
import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def bash(command: str) -> str:
    """Run a shell command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


agent = create_react_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [bash])
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
