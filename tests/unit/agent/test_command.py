"""Programs of others as agents: what they are told, what becomes of their answers, and what they cannot keep."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sandbox.docker_engine import running_engine

from toprope.catalog.command import CommandAgent
from toprope.errors.tree import ConfigError, TransportError
from toprope.http.client import Client
from toprope.protocol.grants import DirectSandbox, SandboxAccess
from toprope.sandbox.desk import Terms
from toprope.sandbox.docker import Docker
from toprope.sandbox.processes import marked
from toprope.sandbox.spec import MIB, Limits, SandboxSpec

from .workshop import ASK, KEY, KINDS, invocation, needs_bwrap, text_of, told, workshop

kinds = pytest.mark.parametrize("kind", KINDS)


def command(tmp_path: Path, program: str, *more: str, **settings: Any) -> CommandAgent:
    files = {"agent.py": ASK + program, **settings.pop("files", {})}
    argv = ["python3", "agent.py", *(more or ("{prompt}",))]
    return CommandAgent(directory=tmp_path, argv=argv, files=files, **settings)


@kinds
@pytest.mark.promise("EP-14")
async def test_a_program_asks_its_model_and_its_answer_is_a_response(kind: str, tmp_path: Path, client: Client) -> None:
    agent = command(tmp_path, "print(ask(sys.argv[1]), ask('again'))")
    async with workshop(agent, tmp_path, client, kind=kind, script=["four"]) as house:
        reply, closed = await house.one("2 and 2?", instructions="Be short.")
        assert text_of(reply) == "four four"
        assert reply.json()["status"] == "completed"
        said = house.engine.requests[0].request.input[0]["content"]
        assert "Be short.\n\n2 and 2?" in json.dumps(said, default=str).replace("\\n", "\n")
        record = invocation(closed)
        assert (record["exit"], record["model_calls"], record["killed_by"]) == (0, 2, None)
        assert record["wall_s"] > 0
        assert record["stdout_bytes"] == len("four four\n")
        assert closed["agent_observations"]["gaps"], "what was not seen is said"
        snapshot = await house.store.freeze(KEY)
        assert len(snapshot.entries) == 2, "both calls are on record under the rollout"


@kinds
async def test_every_client_finds_its_model_and_nothing_of_the_host(
    kind: str, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-host")
    program = "print(json.dumps(dict(os.environ)))"
    agent = command(tmp_path, "ask('x');" + program, env={"MINE": "{model}@{base_url}", "RAW": "{}{other}"})
    async with workshop(agent, tmp_path, client, kind=kind, api_key="sk-of-the-server") as house:
        env = told((await house.one("go", model="m1"))[0])
        text = json.dumps(env)
        for secret in ("hunter2", "sk-of-the-host", "sk-of-the-server"):
            assert secret not in text
        assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == f"{env['ANTHROPIC_BASE_URL']}/v1"
        assert f"/ng-rollout/{KEY}/training-token-capture" in env["ANTHROPIC_BASE_URL"]
        assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == env["ANTHROPIC_AUTH_TOKEN"]
        assert (env["OPENAI_MODEL"], env["ANTHROPIC_MODEL"]) == ("m1", "m1")
        assert env["MINE"] == f"m1@{env['OPENAI_BASE_URL']}"
        assert env["RAW"] == "{}{other}", "other braces stay as they are"
        ours = {"PATH", "HOME", "LANG", "TMPDIR", "TERM", "USER", "LOGNAME", "PWD", "LC_CTYPE", "TOPROPE_SANDBOX"}
        told_of = ("openai_", "anthropic_", "no_proxy", "pyenv", "_pyenv", "shlvl")  # the last: of a shim of python3
        rest = {name for name in env if not name.lower().startswith(told_of)}
        assert rest <= ours | {"MINE", "RAW"}, "a clean environment is a list, not a filter"


@kinds
async def test_the_prompt_comes_by_argument_stdin_or_file(kind: str, tmp_path: Path, client: Client) -> None:
    hard = "line\n'\"$HOME {model} \u00e9\u2028 end"
    agent = command(
        tmp_path,
        "ask('x'); print(json.dumps([sys.argv[1], sys.stdin.read(), open(sys.argv[2]).read()]))",
        "{prompt}",
        "{prompt_file}",
        stdin="{prompt}",
    )
    async with workshop(agent, tmp_path, client, kind=kind) as house:
        assert told((await house.one(hard))[0]) == [hard] * 3


async def test_the_answer_can_be_a_file_or_the_models_last_words(tmp_path: Path, client: Client) -> None:
    program = "ask('x'); open('out.txt', 'w').write('from the file'); print('noise')"
    async with workshop(command(tmp_path, program, answer="file:out.txt"), tmp_path, client) as house:
        assert text_of((await house.one())[0]) == "from the file"
    agent = command(tmp_path, program, answer="model")
    async with Client() as other, workshop(agent, tmp_path, other, script=["words"]) as house:
        await house.seed()
        reply = await house.activate({"input": "go"})
        assert text_of(reply) == "words"
        (entry,) = (await house.store.freeze(KEY)).entries
        assert reply.json()["terminal_response_id"] == entry.response_id, "the call that the reward belongs to"
        await house.close()


@pytest.mark.parametrize("kind", ["bubblewrap", "directory"])
async def test_the_key_of_its_gate_stands_in_no_message_and_no_record(
    kind: str, tmp_path: Path, client: Client
) -> None:
    program = (
        "key = os.environ['OPENAI_API_KEY']; ask('x'); print(key); print('key', key, file=sys.stderr); sys.exit(3)"
    )
    async with workshop(command(tmp_path, program), tmp_path, client, kind=kind) as house:
        reply, closed = await house.one()
        told = reply.text + str(closed)
        assert "key ***" in told
        assert "tr-" not in told


async def test_a_program_that_fails_is_a_failed_response_or_a_failure_as_configured(
    tmp_path: Path, client: Client
) -> None:
    program = "ask('x'); print('so far'); print('what broke', file=sys.stderr); sys.exit(3)"
    async with workshop(command(tmp_path, program), tmp_path, client) as house:
        reply, closed = await house.one()
        assert text_of(reply) == "so far"
        assert reply.json()["status"] == "failed"
        assert "status 3: what broke" in reply.json()["error"]["message"]
        assert invocation(closed)["exit"] == 3
    async with Client() as other, workshop(command(tmp_path, program, on_failure="failure"), tmp_path, other) as house:
        reply, _ = await house.one()
        assert reply.status == 502
        error = reply.json()["error"]
        assert (error["kind"], error["retryable"]) == ("agent_failed", True)
        assert "what broke" in error["message"]


async def test_a_program_that_never_heard_its_model_is_a_failure_and_no_low_reward(
    tmp_path: Path, client: Client
) -> None:
    async with workshop(command(tmp_path, "import not_installed"), tmp_path, client) as house:
        reply, closed = await house.one()
        assert reply.status == 502
        assert reply.json()["error"]["kind"] == "agent_failed"
        assert "not_installed" in reply.json()["error"]["message"]
        assert "not_installed" in invocation(closed)["stderr_end"]


async def test_a_model_that_breaks_is_no_fault_of_the_program(tmp_path: Path, client: Client) -> None:
    program = "ask('x')\ntry:\n    ask('y')\nexcept Exception as error:\n    print('gave up', error)"
    script = [{"text": "one", "when": {"contains": "x"}}, {"fault": {"status": 503}}]
    async with workshop(command(tmp_path, program), tmp_path, client, script=script) as house:
        reply, _ = await house.one()
        assert reply.status == 502
        error = reply.json()["error"]
        assert (error["kind"], error["retryable"]) == ("model_unavailable", True)


async def test_a_program_out_of_its_own_time_gives_an_incomplete_response(tmp_path: Path, client: Client) -> None:
    program = "ask('x'); print('so far', flush=True)\nimport time; time.sleep(1000)"
    async with workshop(command(tmp_path, program, timeout_s=8), tmp_path, client) as house:
        reply, closed = await house.one()
        assert reply.json()["status"] == "incomplete"
        assert text_of(reply) == "so far"
        assert invocation(closed)["killed_by"] == "wall_time"


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


DAEMON = """
ask('x')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        if sys.argv[2] == 'hide':
            os.execve('/bin/sh', ['sh', '-c', 'echo $$ > daemon; sleep 1000'], {'PATH': '/usr/bin:/bin'})
        open('daemon', 'w').write(str(os.getpid()))
        import time; time.sleep(1000)
    os._exit(0)
import time
while not (os.path.exists('daemon') and open('daemon').read().strip()):
    time.sleep(0.01)
"""


@kinds
@pytest.mark.parametrize("how", ["plain", "hide"])
@pytest.mark.promise("EP-14")
async def test_a_daemon_left_behind_ends_with_the_activation(
    kind: str, how: str, tmp_path: Path, client: Client
) -> None:
    program = f"{DAEMON}\nprint('pid', open('daemon').read())"
    agent = command(tmp_path, program, "{prompt}", how)
    async with workshop(agent, tmp_path, client, kind=kind) as house:
        await house.seed()
        reply = await house.activate({"input": "go"})
        pid = text_of(reply).split()[-1]
        if kind == "directory":  # inside bubblewrap the number is of another namespace
            assert not runs(pid), "it lived on after the answer"
        sandbox_id = (await house.close())["agent_observations"]["records"][0]["sandbox_id"]
        assert marked(f"TOPROPE_SANDBOX={sandbox_id}") == []


@kinds
@pytest.mark.promise("EP-10")
async def test_closing_the_session_kills_the_program_and_what_it_started(
    kind: str, tmp_path: Path, client: Client
) -> None:
    agent = command(tmp_path, f"{DAEMON}\nask('daemon is there'); time.sleep(1000)", "{prompt}", "plain")
    async with workshop(agent, tmp_path, client, kind=kind, script=["part"]) as house:
        await house.seed()
        running = asyncio.ensure_future(house.activate({"input": "go"}))
        while house.engine.calls < 2:
            assert not running.done(), running.result().text
            await asyncio.sleep(0)
        closed = await house.close()
        assert (await running).json()["error"]["kind"] == "cancelled"
        record = closed["agent_observations"]["records"][0]
        assert record["ended"] == "stopped"
        assert marked(f"TOPROPE_SANDBOX={record['sandbox_id']}") == []
        assert closed["partial_response"]["status"] == "incomplete"
        assert closed["partial_response"]["output"][0]["content"][0]["text"] == "part", "the model's last words"
        assert house.left() == []


@kinds
async def test_a_gigabyte_of_output_is_cut(kind: str, tmp_path: Path, client: Client) -> None:
    program = "ask('x')\nwhile True: sys.stdout.write('x' * 1_000_000)"
    agent = command(tmp_path, program, answer_bytes=1000, limits={"output_bytes": 8 * MIB})
    async with workshop(agent, tmp_path, client, kind=kind) as house:
        reply, closed = await house.one()
        assert invocation(closed)["killed_by"] == "output"
        assert 8 * MIB < invocation(closed)["stdout_bytes"] < 64 * MIB
        assert len(reply.body) < 10_000
        assert any("1000 bytes" in gap for gap in closed["agent_observations"]["gaps"])


SPY = """
import socket
found = {}
key = os.environ['OPENAI_API_KEY']
base = os.environ['OPENAI_BASE_URL']
def status(url, key):
    asked = urllib.request.Request(url, b'{}', {'authorization': 'Bearer ' + key, 'content-type': 'application/json'})
    try:
        return urllib.request.urlopen(asked, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 'unreachable'
found['other key'] = status(base + '/chat/completions', 'sk-guessed')
found['other rollout'] = status(base.replace('run.0-0', 'run.9-0') + '/chat/completions', key)
found['other path'] = status(base.split('/ng-rollout')[0] + '/v1/chat/completions', key)
found['server itself'] = status(sys.argv[2] + '/v1/chat/completions', key)
paths = {'/etc/shadow': '/etc/shadow', 'environ': '/proc/' + str(os.getppid()) + '/environ', 'secret': sys.argv[3]}
for name, path in paths.items():
    try:
        found[name] = open(path).read()
    except OSError as error:
        found[name] = 'refused'
found['asked'] = ask('honest')
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.promise("EP-14")
async def test_a_hostile_program_reaches_one_url_with_its_own_key_and_no_file_of_the_host(
    kind: str, tmp_path: Path, client: Client
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    agent = command(tmp_path, SPY, "{prompt}", "", str(secret))
    async with workshop(agent, tmp_path, client, kind=kind, api_key="sk-of-the-server") as house:
        agent._argv[-2] = house.model.url
        found = told((await house.one())[0])
        given = {line.partition("=")[0] for line in found.pop("environ").split("\0")}
        assert given <= {"PATH", "PWD", ""}, "what started it was given a PATH and nothing else"
        assert found == {
            "other key": 401,
            "other rollout": 403,
            "other path": 403,
            "server itself": "unreachable",
            "/etc/shadow": "refused",
            "secret": "refused",
            "asked": "said",
        }
        assert [entry.session for entry in [house.engine.requests[-1]]] == [KEY]
        print(
            "\n  other key: the gate (401); other rollout, other path: the gate's one prefix (403); the server itself: "
            "network namespace; /etc/shadow and a file of the host: mount namespace; environ: pid namespace"
        )


@pytest.mark.promise("EP-14")
async def test_the_gate_of_a_plain_directory_has_a_key_too_and_ends_with_the_activation(
    tmp_path: Path, client: Client
) -> None:
    program = "print(json.dumps([os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], ask('x')]))"
    async with workshop(command(tmp_path, program), tmp_path, client, api_key="sk-of-the-server") as house:
        await house.seed()
        base, key, _ = told(await house.activate({"input": "go"}))
        late = client.peer(base, None, api_key=key)
        with pytest.raises(TransportError, match="refused"):
            await late.request("POST", "/chat/completions", body={"model": "m", "messages": []})
        await house.close()


@kinds
@pytest.mark.promise("EP-14")
async def test_a_lent_sandbox_is_worked_in_and_only_let_go(kind: str, tmp_path: Path, client: Client) -> None:
    agent = command(tmp_path, "ask('x'); open('answer', 'w').write(open('given').read() + '!'); print('done')")
    async with workshop(agent, tmp_path, client, kind=kind, own=False) as house:
        lent = await house.desk.make(SandboxSpec(limits=Limits(memory_bytes=256 * MIB)), lease_s=300)
        await lent.write_file("given", b"forty-two")
        await house.seed(access=lent.access())
        assert text_of(await house.activate({"input": "go"})) == "done"
        (record,) = [r for r in (await house.close())["agent_observations"]["records"] if r["kind"] == "sandbox"]
        assert (record["lent"], record["ended"]) == (True, "disconnected")
        assert await lent.read_file("answer") == b"forty-two!", "its owner still has it"
        await lent.stop()


async def test_without_any_sandbox_the_seed_is_refused_and_says_what_is_missing(tmp_path: Path, client: Client) -> None:
    agent = command(tmp_path, "print('x')")
    async with workshop(agent, tmp_path, client, own=False) as house:
        refused = await house.seed()
        assert refused.status == 422
        assert refused.json()["error"]["kind"] == "grant_unavailable"
        assert "lends none" in refused.json()["error"]["message"]
        elsewhere = SandboxAccess(connection=DirectSandbox("unknown", {}), workdir="/")
        unknown = await house.seed("a2", elsewhere)
        assert unknown.status == 422
        assert "'unknown' (known: box)" in unknown.json()["error"]["message"]


async def test_terms_bound_what_an_agent_may_ask_for(tmp_path: Path, client: Client) -> None:
    agent = command(tmp_path, "print(ask('x'))", limits={"wall_s": 1000, "output_bytes": 10 * MIB})
    terms = Terms(limits=Limits(wall_s=5, output_bytes=MIB), network="none")
    async with workshop(agent, tmp_path, client, terms=terms) as house:
        reply, _ = await house.one()
        assert reply.json()["error"]["kind"] == "forbidden"
        assert "network: none" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["true"]}, "prompt"),
        ({"argv": ["x", "{prompt}"], "answer": "stderr"}, "answer"),
        ({"argv": ["x", "{prompt}"], "answer": "file:"}, "answer"),
        ({"argv": ["x", "{prompt}"], "timeout_s": 0}, "timeout_s"),
        ({"argv": ["x", "{prompt}"], "copy": {"a": "no-such-file"}}, r"copy\.a"),
        ({"argv": ["x", "{prompt}"], "limits": {"memory": 3}}, "memory_bytes"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        CommandAgent(directory=tmp_path, **settings)


async def test_a_prompt_that_fits_into_no_argument_is_said(tmp_path: Path, client: Client) -> None:
    async with workshop(command(tmp_path, "print(1)"), tmp_path, client) as house:
        reply, _ = await house.one("x" * 200_000)
        assert "prompt_file" in reply.json()["error"]["message"]
        assert reply.json()["error"]["retryable"] is False


@needs_bwrap  # the engine's stand-in runs its containers by bubblewrap
@pytest.mark.promise("EP-14")
async def test_a_program_in_a_container_reaches_its_model_too(tmp_path: Path, client: Client) -> None:
    async with running_engine(tmp_path / "engine") as engine:
        provider = Docker(tmp_path / "leases", name="box", engine=engine.url, image="image:1")
        agent = command(tmp_path, "print(ask(sys.argv[1]))")
        async with workshop(agent, tmp_path, client, provider=provider, api_key="sk-of-the-server") as house:
            reply, closed = await house.one()
            assert text_of(reply) == "said"
            assert invocation(closed)["model_calls"] == 1
        assert engine.containers == {}, "a container is left"
