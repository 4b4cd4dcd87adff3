"""The reference of all settings as Markdown, made from the settings themselves.

`python -m toprope.launch.reference` prints it; docs/reference/configuration.md is its output, and a test compares.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from toprope.launch.load import MAX_VALUES
from toprope.launch.server_settings import ROLES, LimitsConfig, RendererConfig, SandboxConfig, SandboxLimits
from toprope.launch.settings import (
    CaptureConfig,
    Config,
    EnvironmentShare,
    RunConfig,
    TaskSource,
    TransportConfig,
    TransportNames,
)
from toprope.launch.strict import type_name

INTRODUCTION = f"""\
# Configuration

Made from the settings by `python -m toprope.launch.reference`; do not edit.

One YAML file. It is read strictly: an unknown key is refused with the nearest valid name, a key written twice too.
`${{NAME}}` and `${{NAME:default}}` stand for environment variables, any other `${{` is refused; `--set a.b=c` changes
one value from the command line. A file holds at most {MAX_VALUES} values, an aliased one (`*name`) counted each time.

    servers:
      policy:   {{role: model, engine: {{kind: embedded}}}}
      sums:     {{role: resources, use: reasoning_gym, config: {{dataset: basic_arithmetic}}}}
      solver:   {{role: agent, use: tool_loop, model: policy, token_id_capture: true}}
      episode:  {{role: environment, use: single_agent_turn, resources: sums, agent: solver, tools: [direct_http]}}
    run:
      environment: episode
      tasks: {{generate: sums, size: 32, seed: 7}}
      repeats: 4
    token_id_capture: {{enabled: true}}

`use` is an entry point (groups `toprope.environments`, `toprope.agents`, `toprope.protocols`, `toprope.engines` for
`engine.kind`), or `module:Class`; modules beside the configuration and in the current directory are found. The
servers share one process and call each other without sockets. A server binds a port when it has `port`, under
`toprope serve`, when the configuration names a server elsewhere (`url`) that may need to call it, and a model server
also when an agent of it starts programs of others (`command`, `remote`). `toprope run`
and `toprope check` ask the servers elsewhere before anything else; any HTTP answer will do.
"""


def render() -> str:
    """The whole page. Raises `ValueError` naming a setting that has no description."""
    parts = [INTRODUCTION, table("The file", Config)]
    parts += [table(f"servers: `role: {role}`", kind) for role, kind in ROLES.items()]
    parts += [
        table("servers: `limits` of a model server", LimitsConfig),
        table("servers: `token_in_renderer` of a model server", RendererConfig),
        table("sandboxes: one provider", SandboxConfig),
        table("sandboxes: `limits` of one", SandboxLimits),
        table("run", RunConfig),
        table("run.tasks: one source", TaskSource),
        table("run.environment: one share", EnvironmentShare),
        table("run.transport", TransportConfig),
        table("token_id_capture", CaptureConfig),
        table("token_id_capture.store: a transport of your own", TransportNames),
    ]
    return "\n".join(parts)


def table(title: str, kind: Any) -> str:
    """The settings of one struct under a heading. Raises `ValueError` naming a setting that has no description."""
    hints = get_type_hints(kind, include_extras=True)
    lines = [f"## {title}", "", "| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for field in msgspec.structs.fields(kind):
        accepted = type_name(hints[field.name]).replace("|", "or")
        lines.append(
            f"| `{field.name}` | {accepted} | {_default(field)} | {_description(kind, field.name, hints[field.name])} |"
        )
    return "\n".join(lines) + "\n"


def _description(kind: type, name: str, hint: Any) -> str:
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    for meta in metas:
        if getattr(meta, "description", None):
            return str(meta.description)
    raise ValueError(f"{kind.__name__}.{name} has no description")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or isinstance(value, msgspec.Struct) or value in ([], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> None:
    """Print the page."""
    print(render(), end="")


if __name__ == "__main__":
    main()
