"""How each program is told its model: what a user would write into the configuration of a `command` agent.

Settings that only keep a program from asking for names on the network stand among the rest; each program's own page
has them.
"""

from __future__ import annotations

import json

from .house import MODULES, NODE, PYTHON, Recipe

CODEX = Recipe(
    argv=(
        str(MODULES / ".bin/codex"),
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "{prompt}"),
    ),
    version=(str(NODE), str(MODULES / ".bin/codex"), "--version"),
    env={"POLICY_KEY": "{api_key}"},
    files={
        ".codex/config.toml": """
model = "{model}"
model_provider = "policy"
model_context_window = 64000
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false
[agents]
enabled = false
[features]
plugins = false
apps = false
goals = false
[model_providers.policy]
name = "policy"
base_url = "{base_url}"
wire_api = "responses"
env_key = "POLICY_KEY"
"""
    },
)

_PI = MODULES / "@mariozechner/pi-coding-agent/dist/cli.js"


def pi(api: str) -> Recipe:
    """pi speaks all three dialects; the Anthropic one adds `/v1` itself."""
    url = "{root_url}" if api == "anthropic-messages" else "{base_url}"
    model = {
        "id": "stub-model",
        "name": "stub",
        "reasoning": False,
        "input": ["text"],
        "contextWindow": 64000,
        "maxTokens": 4096,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    providers = {"policy": {"baseUrl": url, "api": api, "apiKey": "{api_key}", "models": [model]}}
    return Recipe(
        argv=(str(NODE), str(_PI), "-p", "--provider", "policy", "--model", "stub-model", "{prompt}"),
        version=(str(NODE), str(_PI), "--version"),
        env={"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
        files={".pi/agent/models.json": json.dumps({"providers": providers})},
    )


_OPENCODE = MODULES / "opencode-linux-x64/bin/opencode"


def opencode(package: str) -> Recipe:
    """opencode picks the dialect by the package of its provider; `--title` spares the call that makes one up."""
    provider = {
        "npm": package,
        "name": "policy",
        "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
        "models": {"stub-model": {"name": "stub", "limit": {"context": 64000, "output": 4096}}},
    }
    settings = {
        "provider": {"policy": provider},
        "model": "policy/stub-model",
        "small_model": "policy/stub-model",
        "autoupdate": False,
        "share": "disabled",
    }
    switches = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
    return Recipe(
        argv=(str(_OPENCODE), "run", "--title", "t", "-m", "policy/stub-model", "{prompt}"),
        version=(str(_OPENCODE), "--version"),
        env={f"OPENCODE_DISABLE_{name}": "1" for name in switches},
        files={".config/opencode/opencode.json": json.dumps(settings)},
    )


_QWEN = MODULES / "@qwen-code/qwen-code/cli-entry.js"
QWEN = Recipe(
    argv=(str(NODE), str(_QWEN), "--auth-type", "openai", "-y", "-p", "{prompt}"),
    version=(str(NODE), str(_QWEN), "--version"),
    files={
        ".qwen/settings.json": json.dumps(
            {
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                "general": {"enableAutoUpdate": False},
                "tools": {"useRipgrep": False},
            }
        )
    },
)

MINI = Recipe(
    argv=(
        str(PYTHON.parent / "mini"),
        *("-m", "openai/stub-model", "-t", "{prompt}", "-y", "--exit-immediately", "-o", "trajectory.json"),
    ),
    version=(str(PYTHON), "-c", "from importlib.metadata import version; print(version('mini-swe-agent'))"),
    env={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    # It ends when a command of the model prints a word of its own.
    policy="""
def FINISH(call):
    name, parameter, _ = tool(call.request.request.tools)
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return ScriptedReply(text=ANSWER, calls=[ScriptedCall(name, json.dumps({parameter: done}))])
""",
)


def script(name: str, package: str, text: str) -> Recipe:
    """A few lines of Python in somebody's framework, with one tool that runs a shell command."""
    shell = '''
import os, subprocess, sys

def run(command):
    """Run a shell command and give its output."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout

'''
    return Recipe(
        argv=(str(PYTHON), name, "{prompt}"),
        version=(str(PYTHON), "-c", f"from importlib.metadata import version; print(version({package!r}))"),
        copy={name: shell + text},
    )


def agents_sdk(model: str) -> Recipe:
    """openai-agents over Chat or Responses (`model` is its class), streamed."""
    return script(
        "with_agents_sdk.py",
        "openai-agents",
        f'''
import asyncio
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def bash(command: str) -> str:
    """Run a shell command."""
    return run(command)

async def main():
    model = {model}(model=os.environ["OPENAI_MODEL"], openai_client=AsyncOpenAI())
    result = Runner.run_streamed(Agent(name="coder", model=model, tools=[bash]), sys.argv[1])
    async for event in result.stream_events():
        pass
    print(result.final_output)

asyncio.run(main())
''',
    )


LANGGRAPH_CHAT = script(
    "with_langgraph.py",
    "langgraph",
    '''
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

@tool
def bash(command: str) -> str:
    """Run a shell command."""
    return run(command)

agent = create_react_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [bash])
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
''',
)

LANGGRAPH_MESSAGES = script(
    "with_langgraph_anthropic.py",
    "langchain-anthropic",
    '''
from langchain_core.tools import tool
from langchain_anthropic import ChatAnthropic
from langgraph.prebuilt import create_react_agent

@tool
def bash(command: str) -> str:
    """Run a shell command."""
    return run(command)

agent = create_react_agent(ChatAnthropic(model=os.environ["ANTHROPIC_MODEL"], streaming=True), [bash])
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
''',
)

SMOLAGENTS = script(
    "with_smolagents.py",
    "smolagents",
    '''
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

@tool
def bash(command: str) -> str:
    """Run a shell command.

    Args:
        command: The command.
    """
    return run(command)

model = OpenAIServerModel(os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"],
                          api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[bash], model=model, max_steps=4).run(sys.argv[1]))
''',
)
# It ends when the model calls a tool of its own with the answer.
SMOLAGENTS = Recipe(
    argv=SMOLAGENTS.argv,
    version=SMOLAGENTS.version,
    copy=SMOLAGENTS.copy,
    policy="""
def FINISH(call):
    arguments = json.dumps({"answer": ANSWER})
    return ScriptedReply(text=ANSWER, calls=[ScriptedCall("final_answer", arguments)])
""",
)

LITELLM = script(
    "with_litellm.py",
    "litellm",
    """
import litellm

messages = [{"role": "user", "content": sys.argv[1]}]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "description": "Run it", "parameters": parameters}}]
while True:
    message = litellm.completion(model=f"anthropic/{os.environ['ANTHROPIC_MODEL']}", messages=messages, tools=tools,
                                 max_tokens=1000).choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        import json
        output = run(json.loads(call.function.arguments)["command"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
print(message.content)
""",
)

PROGRAMS = {
    "codex": CODEX,
    "pi-chat": pi("openai-completions"),
    "pi-responses": pi("openai-responses"),
    "pi-messages": pi("anthropic-messages"),
    "opencode-chat": opencode("@ai-sdk/openai-compatible"),
    "opencode-responses": opencode("@ai-sdk/openai"),
    "opencode-messages": opencode("@ai-sdk/anthropic"),
    "qwen-code": QWEN,
    "mini-swe-agent": MINI,
    "agents-sdk-chat": agents_sdk("OpenAIChatCompletionsModel"),
    "agents-sdk-responses": agents_sdk("OpenAIResponsesModel"),
    "langgraph-chat": LANGGRAPH_CHAT,
    "langgraph-messages": LANGGRAPH_MESSAGES,
    "smolagents": SMOLAGENTS,
    "litellm-messages": LITELLM,
}

REWRITES = {
    "pi-chat": "arguments",
    "pi-responses": "arguments",
    "opencode-chat": "arguments",
    "opencode-responses": "arguments, and the thought is dropped",
    "qwen-code": "arguments",
    "agents-sdk-chat": "the thought is dropped",
    "langgraph-chat": "arguments, and the thought is dropped",
    "smolagents": "calls become text of another kind, which no recorded call said",
}
"""Programs that send the model's own turn back in other words. The engine then renders other ids than were sampled: the
rollout is masked and says why, unless the next prompt is made of the recorded ids (`token_in`)."""
