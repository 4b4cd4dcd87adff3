"""A configuration is read strictly: a mistake names the file, the key path, the value and what would be accepted."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from toprope.errors.tree import ConfigError
from toprope.launch.config import BESIDE_URL, Configuration, load_configuration, task_sources
from toprope.launch.load import MAX_VALUES, parse_yaml
from toprope.launch.server_settings import ROLES, EnvironmentConfig, ModelConfig
from toprope.launch.settings import CaptureConfig, EnvironmentShare, RunConfig, TaskSource, TransportConfig
from toprope.launch.strict import Where, read
from toprope.wire.responses import NOT_SAMPLING, REQUEST_PARAMETERS

GOOD = """
servers:
  policy:   {role: model, engine: {kind: scripted}}
  sums:     {role: resources, use: reasoning_gym, config: {dataset: basic_arithmetic}}
  solver:   {role: agent, use: tool_loop, model: policy, token_id_capture: true}
  episode:  {role: environment, use: single_agent_turn, resources: sums, agent: solver, tools: [direct_http]}
run:
  environment: episode
  tasks: {generate: sums, size: 32, seed: 7}
  repeats: 4
  concurrency: 16
token_id_capture: {enabled: true}
"""


def load(tmp_path: Path, *sets: str, text: str = GOOD, environ: dict[str, str] | None = None) -> Configuration:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_configuration(path, sets, environ or {})


def test_the_example_of_the_documentation_reads_as_written(tmp_path: Path) -> None:
    configuration = load(tmp_path)
    assert list(configuration.servers) == ["policy", "sums", "solver", "episode"]
    assert configuration.run is not None
    assert (configuration.run.repeats, configuration.run.concurrency, configuration.run.max_attempts) == (4, 16, 3)
    assert configuration.captured("solver")


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("run.repeets=3", ["run.repeets", "did you mean 'repeats'"]),
        ("run.repeats=four", ["run.repeats", "'four'", "whole number"]),
        ("run.repeats=0", ["run.repeats", "0", ">= 1"]),
        ("run.repeats=true", ["run.repeats", "whole number"]),
        ("run.concurrency=0", ["run.concurrency"]),
        ("servers.solver.model=polic", ["servers.solver.model", "'polic'", "did you mean 'policy'"]),
        ("servers.solver.model=sums", ["servers.solver.model", "another role", "policy"]),
        ("servers.sums.rle=1", ["servers.sums.rle", "did you mean 'role'"]),
        ("servers.sums.role=resource", ["servers.sums.role", "'resource'", "did you mean 'resources'"]),
        ("servers.sums=3", ["servers.sums", "3", "mapping"]),
        ("servers.episode.tools=[direct]", ["servers.episode.tools.0", "'direct'", "did you mean 'direct_http'"]),
        ("servers.episode.agent=null", ["servers.episode.agent", "required"]),
        ("servers.sums.place=process", ["servers.sums.place", "not supported yet", "inline"]),
        ('servers.solver.mcp_stdio=["a \'b"]', ["servers.solver.mcp_stdio", "quotation", "a program"]),
        ("servers.solver.mcp_stdio=['']", ["servers.solver.mcp_stdio", "empty", "a program"]),
        ("servers.solver.mcp_stdio=[{comand: x}]", ["servers.solver.mcp_stdio.0"]),
        ("servers.episode.mcp_servers={clock: {}}", ["servers.episode.mcp_servers.clock", "`url` or a `command`"]),
        ("servers.episode.mcp_servers={a/b: {url: 'http://a/mcp'}}", ["mcp_servers.a/b", "'a/b'", "cannot name"]),
        ("servers.episode.mcp_servers={environment: {url: 'http://a/mcp'}}", ["'environment'", "cannot name"]),
        ("servers.episode.mcp_servers={a: {url: 'ftp://a'}}", ["mcp_servers.a.url", "'ftp://a'", "http://host:port"]),
        (
            "servers.episode.mcp_servers={clock: {command: clock, args: [x y]}}",
            ["servers.episode.mcp_servers.clock.command", "clock 'x y'", "mcp_stdio", "does not list"],
        ),
        ("servers.sums.workers=2", ["servers.sums.workers", "not supported yet"]),
        ("servers.sums.protocol=flat", ["servers.sums.protocol", "'flat'", "url", "typed"]),
        ("servers.sums.url=localhost:80", ["servers.sums.url", "localhost:80", "http://"]),
        ("servers.policy.limits={max_body: 5}", ["servers.policy.limits.max_body", "did you mean 'max_body_bytes'"]),
        ("servers.policy.limits={max_body_bytes: 0}", ["servers.policy.limits.max_body_bytes", "0", ">= 1"]),
        ("servers.policy.host=0.0.0.0", ["servers.policy.host", "api_key"]),
        ("run.environment={sums: {environment: episod}}", ["run.environment.sums", "did you mean 'episode'"]),
        ("run.environment={sums: {environment: episode, weight: -1}}", ["run.environment.sums.weight", "-1"]),
        ("run.agent=solver", ["run.agent", "beside `environment`"]),
        ("run={agent: solver}", ["run.agent", "'solver'", "no /run of its own", "environment"]),
        ("run={agent: solvr}", ["run.agent", "did you mean 'solver'"]),
        ("run.tasks={size: 3}", ["run.tasks", "generate", "file"]),
        ("run.tasks={generate: sum}", ["run.tasks.generate", "did you mean 'sums'"]),
        ("run.tasks=[{generate: sums}, {generate: solver}]", ["run.tasks.1.generate", "another role"]),
        ("token_id_capture.store=disk", ["token_id_capture.store", "sqlite"]),
        ("runn={}", ["runn", "did you mean 'run'"]),
        ("run.concurrency=${NOT_SET}", ["run.concurrency", "NOT_SET", "default"]),
        ("run.repeats", ["--set run.repeats", "KEY=VALUE"]),
        ("run.repeats.more=1", ["run.repeats", "4", "no keys"]),
        ("servers.solver={rol: agent}", ["servers.solver.rol", "no key 'rol'", "did you mean 'role'"]),
        ("servers.episode.tools=direct_http", ["servers.episode.tools", "'direct_http'", "list of"]),
        ("servers.policy.url=http://a", ["servers.policy.engine", "url", "one of them"]),
        (
            "servers.episode={role: environment, url: 'http://a', config: {}}",
            ["servers.episode.config", "episode_timeout_s"],
        ),
        (
            "servers.episode={role: environment, url: 'http://a', use: interactive}",
            ["servers.episode.use", "elsewhere"],
        ),
        ("servers.episode={role: environment, url: 'http://a', agent: sole}", ["servers.episode.agent", "'solver'"]),
        ("servers.sums={role: resources, url: 'http://a', sandbox: box}", ["servers.sums.sandbox", "protocol"]),
        ("servers.sums={role: resources, url: 'http://a', mcp: true}", ["servers.sums.mcp", "elsewhere"]),
        ("servers.sums={role: resources, url: 'http://a', session_ttl_s: 9}", ["servers.sums.session_ttl_s"]),
        ("servers.solver={role: agent, url: 'http://a', max_steps: 3}", ["servers.solver.max_steps", "close_reply"]),
        ("servers.solver={role: agent, url: 'http://a', model: polic}", ["servers.solver.model", "'policy'"]),
        ("servers.policy={role: model, url: 'http://a', limits: {calls: 3}}", ["servers.policy.limits", "api_key"]),
        ("servers.policy={role: model, url: 'http://a', port: 80}", ["servers.policy.port", "elsewhere"]),
        ("run.tasks={file: a.jsonl, size: 3}", ["run.tasks", "`size`", "`limit`"]),
        ("sandboxes={box: {kind: docker, control_groups: false}}", ["sandboxes.box.control_groups", "docker"]),
        ("servers.episode.mcp_servers={a: {url: 'http://a/', args: [b]}}", ["mcp_servers.a", "`args`", "`command`"]),
        ("servers.episode.mcp_servers={a: {command: a, headers: {b: c}}}", ["mcp_servers.a", "`headers`", "`url`"]),
        ("servers.episode.episode_timeout_s=.inf", ["servers.episode.episode_timeout_s", "inf", "finite"]),
        ("servers.sums.config.until=2026-01-01", ["servers.sums.config.until", "date", "quotes"]),
        ("servers.episode.tools=[mcp, mcp]", ["servers.episode.tools", "names one twice", "at most once"]),
        ("servers.sums={role: resources, url: 'http://a b/'}", ["servers.sums.url", "'http://a b/'", "no host"]),
        ("servers.sums={role: resources, url: 'http://a:x/'}", ["servers.sums.url", "http://host:port"]),
        ("servers.sums={role: resources, url: 'http://a/b c'}", ["servers.sums.url", "white space"]),
        ("servers.sums={role: resources, url: 'inline://a'}", ["servers.sums.url", "http://host:port"]),
        (
            "run.environment={sums: {environment: episode, sampling: {temprature: 1}}}",
            ["run.environment.sums.sampling.temprature", "did you mean 'temperature'"],
        ),
        ("run.name='a${NOPE'", ["run.name", "'a${NOPE'", "${NAME}"]),
        ("run.name='${1}'", ["run.name", "${NAME:default}"]),
        ("token_id_capture.max_mask_fraction=7", ["token_id_capture.max_mask_fraction", "7", "<= 1.0"]),
    ],
)
def test_a_mistake_names_the_place_the_value_and_what_is_accepted(
    tmp_path: Path, change: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, change)
    assert [part for part in parts if part not in caught.value.message] == []
    assert "run.yaml" in caught.value.message or "--set" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_server_name_that_is_a_number_is_asked_for_in_quotes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="servers: the key 3 is not text; write it in quotes"):
        load(tmp_path, text="servers: {3: {role: model}}\n")


def test_every_setting_can_be_given() -> None:
    for kind in (*ROLES.values(), RunConfig, CaptureConfig, TransportConfig, TaskSource):
        for field in msgspec.structs.fields(kind):
            # A type that the reader cannot take fails here, whatever the value.
            if field.default is not msgspec.NODEFAULT:
                assert read(msgspec.to_builtins(field.default), field.type, Where(field.name)) == field.default


@pytest.mark.parametrize("text", ["servers: &a {x: *a}\n", "servers: " + "[" * 3000 + "]" * 3000 + "\n"])
def test_a_file_that_has_no_end_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: a value is nested too deeply"):
        load(tmp_path, text=text)


def laughs(line: str) -> str:
    """Nine names, each of which stands for the one before nine times."""
    names = "abcdefghij"
    return "\n".join(line.format(name=name, before=", ".join([f"*{was}"] * 9)) for was, name in pairwise(names))


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\n" + laughs("{name}: &{name} [{before}]"),
        "- &a [x]\n" + laughs("- &{name} [{before}]"),
        "servers: [" + "x, " * MAX_VALUES + "x]",
    ],
)
def test_a_few_lines_that_stand_for_billions_of_values_are_refused_with_the_bound(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml: the YAML holds more than {MAX_VALUES} values"):
        load(tmp_path, text=text)


def test_mappings_merged_again_and_again_end_soon() -> None:
    text = "a: &a {" + ", ".join(f"k{n}: 1" for n in range(9)) + "}\n" + laughs("{name}: &{name} {{<<: [{before}]}}")
    with suppress(ConfigError):  # PyYAML before 6.0.4 copies each pair each time, and the bound ends that
        assert parse_yaml(text, Where("run.yaml"))["j"] == {f"k{n}": 1 for n in range(9)}


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize("name", sorted(NOT_SAMPLING))
def test_sampling_cannot_say_what_is_asked_or_how_it_is_answered(tmp_path: Path, name: str) -> None:
    change = f"run.environment={{sums: {{environment: episode, sampling: {{{name}: true}}}}}}"
    with pytest.raises(ConfigError, match=rf"run\.environment\.sums\.sampling\.{name}: .* is no setting of sampling"):
        load(tmp_path, change)


def test_sampling_passes_every_known_parameter_and_what_only_an_engine_knows(tmp_path: Path) -> None:
    own = {"guided_json": "{}", "min_p": 0.1, "max_completion_tokens": 4, "chat_template_kwargs": {}}
    sampling = {**dict.fromkeys(REQUEST_PARAMETERS - NOT_SAMPLING, 1), **own}
    change = "run.environment={sums: {environment: episode, sampling: " + msgspec.json.encode(sampling).decode() + "}}"
    run = load(tmp_path, change).run
    assert run is not None
    assert isinstance(run.environment, dict)
    assert run.environment["sums"] == EnvironmentShare(environment="episode", sampling=sampling)


def test_a_dollar_and_a_brace_can_still_be_written(tmp_path: Path) -> None:
    run = load(tmp_path, "run.name='${DOLLAR:$}{x} $5 {y}'").run
    assert run is not None
    assert run.name == "${x} $5 {y}"


def test_a_resources_server_elsewhere_may_offer_mcp(tmp_path: Path) -> None:
    sets = ("servers.sums={role: resources, url: 'http://a:1/x'}", "servers.episode.tools=[mcp]", "run=null")
    episode = load(tmp_path, *sets).servers["episode"]
    assert isinstance(episode, EnvironmentConfig)
    assert list(episode.tools) == ["mcp"]


def test_a_file_that_is_not_yaml_names_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml, line 2, column \d+: this is not YAML"):
        load(tmp_path, text="servers:\n  a: [1, }\n")


def test_a_key_written_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'run' stands twice, in lines 1 and 3"):
        load(tmp_path, text="run: {}\nservers: {}\nrun: {}\n")


def test_an_absent_file_and_an_empty_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: the configuration cannot be read: No such file"):
        load_configuration(tmp_path / "absent.yaml", (), {})
    with pytest.raises(ConfigError, match="a mapping with the keys servers and run"):
        load(tmp_path, text="")


def test_the_environment_fills_values_of_every_type(tmp_path: Path) -> None:
    configuration = load(
        tmp_path,
        "run.concurrency=${LANES}",
        "run.min_coverage=${COVERAGE:0.5}",
        "token_id_capture.enabled=${CAPTURE:false}",
        "servers.policy.engine.base_url=http://${HOST:localhost}:${PORT}/v1",
        "servers.policy.api_key=${KEY}",
        environ={"LANES": "8", "PORT": "81", "KEY": "123"},
    )
    assert configuration.run is not None
    assert configuration.run.concurrency == 8
    assert configuration.run.min_coverage == 0.5
    assert not configuration.capture.enabled
    policy = configuration.servers["policy"]
    assert isinstance(policy, ModelConfig)
    assert policy.engine["base_url"] == "http://localhost:81/v1"
    assert policy.api_key == "123", "digits stay text where text is expected"


def test_a_value_from_the_environment_cannot_add_keys(tmp_path: Path) -> None:
    configuration = load(tmp_path, "run.name=${NAME}", environ={"NAME": "x, repeats: 9"})
    assert configuration.run is not None
    assert (configuration.run.name, configuration.run.repeats) == ("x, repeats: 9", 4)


def test_set_reaches_into_lists_and_makes_absent_mappings(tmp_path: Path) -> None:
    configuration = load(
        tmp_path, "run.tasks=[a.jsonl, {generate: sums}]", "run.tasks.1.size=5", "run.transport.attempts=2"
    )
    assert configuration.run is not None
    first, second = task_sources(configuration.run)
    assert first.file == "a.jsonl"
    assert (second.generate, second.size) == ("sums", 5)
    assert configuration.run.transport.attempts == 2


def test_several_environments_keep_weight_and_sampling(tmp_path: Path) -> None:
    configuration = load(
        tmp_path, "run.environment={sums: {environment: episode, weight: 2, sampling: {temperature: 0.5}}, b: episode}"
    )
    assert configuration.run is not None
    assert configuration.run.environment == {
        "sums": EnvironmentShare(environment="episode", weight=2.0, sampling={"temperature": 0.5}),
        "b": "episode",
    }


def test_a_server_elsewhere_needs_only_its_url(tmp_path: Path) -> None:
    text = """
servers:
  sums: {role: resources, url: "http://127.0.0.1:9"}
  solver: {role: agent, url: "http://127.0.0.1:8"}
  episode: {role: environment, resources: sums, agent: solver}
"""
    configuration = load(tmp_path, text=text)
    assert configuration.run is None
    assert configuration.servers["sums"].url == "http://127.0.0.1:9"


def test_a_server_elsewhere_is_told_how_it_is_driven_and_nothing_that_would_be_ignored(tmp_path: Path) -> None:
    for role, accepted in BESIDE_URL.items():
        assert set(accepted) < set(role.__struct_fields__)
    text = """
servers:
  policy: {role: model, url: "http://127.0.0.1:7", api_key: k}
  sums: {role: resources, url: "http://127.0.0.1:9", protocol: flat}
  solver: {role: agent, url: "http://127.0.0.1:8", model: policy, token_id_capture: true, close_reply: optional}
  episode: {role: environment, url: "http://127.0.0.1:6", agent: solver, episode_timeout_s: 9}
token_id_capture: {enabled: true}
"""
    assert load(tmp_path, text=text).captured("solver")


def test_capture_needs_both_the_run_and_the_agent_unless_all_are_meant(tmp_path: Path) -> None:
    assert not load(tmp_path, "token_id_capture.enabled=false").captured("solver")
    assert not load(tmp_path, "servers.solver.token_id_capture=false").captured("solver")
    everyone = load(tmp_path, "servers.solver.token_id_capture=false", "token_id_capture.all_agents=true")
    assert everyone.captured("solver")
