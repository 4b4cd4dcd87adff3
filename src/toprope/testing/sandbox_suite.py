"""What any sandbox provider must keep, as plain async functions: the conformance suite for sandboxes.

`CHECKS` hold for every provider. What a provider holds back beyond that is its report's affair: of `HELD`, each check
belongs to one aspect and is due where the report claims it. A check returns when the promise holds and raises
`Nonconforming` when it does not; each makes the sandboxes it needs and stops them. What needs a process to die is left
to the caller. Programs used: `sh`, `cat`, `sleep`, `head`, and `python3` for the model's URL.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from toprope.errors.tree import ConfigError, Forbidden, TopropeError
from toprope.sandbox.provider import Sandbox, SandboxProvider, require_limits
from toprope.sandbox.spec import (
    MIB,
    Aspect,
    FileTooLarge,
    Limits,
    OutsideWorkdir,
    SandboxLost,
    SandboxSpec,
)


class Nonconforming(AssertionError):
    """The provider breaks a promise; the message says which and how."""


SMALL = Limits(wall_s=60, cpu_s=30, memory_bytes=96 * MIB, processes=32, output_bytes=4 * MIB, file_bytes=8 * MIB)
"""Limits of every sandbox of the suite: a bomb stays small."""

_TRIED_S = (2.0, 8.0, 32.0)
"""Time that a sandbox or a run is given so that it is over in the middle of a program: a busy machine needs more of it
before the program begins, and what is tried on a quick one should take no longer than it must."""

Check = Callable[[SandboxProvider], Awaitable[None]]


def _must(held: bool, promise: str) -> None:
    if not held:
        raise Nonconforming(promise)


@asynccontextmanager
async def _sandbox(provider: SandboxProvider, **changes: Any) -> AsyncIterator[Sandbox]:
    sandbox = await provider.create(dataclasses.replace(SandboxSpec(limits=SMALL, lease_s=300), **changes))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def _refused(call: Awaitable[object], error: type[BaseException]) -> bool:
    try:
        await call
    except error:
        return True
    return False


async def a_run_gives_exit_output_and_errors(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        done = await sandbox.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in")
        _must((done.exit, done.stdout.data, done.stderr.data) == (3, b"in", b"err\n"), f"exit, stdout, stderr: {done}")
        _must(not done.timed_out and done.killed_by is None, f"a run that ended by itself was killed: {done}")
        missing = await sandbox.run(["no-such-program-anywhere"])
        _must(missing.exit == 127, f"a program that does not exist is status 127, as in a shell: {missing}")


async def a_run_works_in_the_work_directory(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        done = await sandbox.run(["sh", "-c", "pwd; echo made > here"])
        _must(done.stdout.text.strip() == sandbox.workdir, f"a run starts in {sandbox.workdir}: {done}")
        _must(await sandbox.read_file("here") == b"made\n", "what a run writes can be read")
        _must(await sandbox.read_file(f"{sandbox.workdir}/here") == b"made\n", "also by its path inside")


async def files_go_in_and_come_out(provider: SandboxProvider) -> None:
    data = secrets.token_bytes(300_000)
    async with _sandbox(provider) as sandbox:
        await sandbox.write_file("deep/down/file", data)
        _must(await sandbox.read_file("deep/down/file") == data, "a file comes back as it was written")
        await sandbox.write_file("deep/down/file", b"#!/bin/sh\necho ran", executable=True)
        done = await sandbox.run(["./deep/down/file"])
        _must(done.stdout.data == b"ran\n", f"a file is replaced, and can be executable: {done}")
        appended = await sandbox.run(["sh", "-c", "echo more >> deep/down/file && echo x > deep/beside"])
        _must(appended.exit == 0, f"code inside may change what was written for it: {appended}")
        _must(await _refused(sandbox.read_file("nothing"), FileNotFoundError), "no file is FileNotFoundError")
        _must(await _refused(sandbox.read_file("deep/down/file", limit=4), FileTooLarge), "the limit of a read holds")


async def files_outside_are_refused(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        made = await sandbox.run(
            ["sh", "-c", "ln -s /etc/passwd link; ln -s / root; ln -s nowhere dangling; mkdir dir"]
        )
        _must(made.exit == 0, f"links can be made inside: {made}")
        for path in ("../x", "/etc/passwd", "dir/../../x", "", ".", "link", "root/etc/passwd", "dir", "dangling"):
            _must(await _refused(sandbox.read_file(path), OutsideWorkdir), f"read_file({path!r}) is refused")
        for path in ("../x", "/etc/x", "root/tmp/x", "", "dir"):
            _must(await _refused(sandbox.write_file(path, b"x"), (OutsideWorkdir)), f"write_file({path!r}) is refused")
        await sandbox.write_file("link", b"mine")
        _must(await sandbox.read_file("link") == b"mine", "a file is written in the place of a link, never through it")


async def a_pipe_in_the_way_blocks_nobody(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        await sandbox.run(["sh", "-c", "mkfifo pipe"])
        read = asyncio.wait_for(sandbox.read_file("pipe"), 120)
        _must(await _refused(read, OutsideWorkdir), "a pipe is no file to read")
        await asyncio.wait_for(sandbox.write_file("pipe", b"file"), 120)
        _must(await sandbox.read_file("pipe") == b"file", "a file is written in the place of a pipe")


async def environment_is_only_what_was_given(provider: SandboxProvider) -> None:
    async with _sandbox(provider, env={"OF_ALL": "1"}) as sandbox:
        done = await sandbox.run(["env"], env={"OF_ONE": "a b=c\n'\""})
        lines = done.stdout.text
        _must("OF_ALL=1" in lines and "OF_ONE=a b=c\n'\"" in lines, f"env of the sandbox and of the run: {lines}")
        _must("TOPROPE_SECRET_OF_THE_HOST" not in lines, "nothing of the host's environment comes in")


async def output_is_bounded_and_the_cut_is_said(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        done = await sandbox.run(["sh", "-c", "head -c 100000 /dev/zero; echo end >&2"], output_limit=1000)
        _must(done.exit == 0 and len(done.stdout.data) == 1000, f"output_limit is what is kept: {done.exit}")
        _must(done.stdout.truncated and done.stdout.total == 100_000, "the cut is said, with the true size")
        _must("99000 more bytes" in done.stdout.text, "also in the text")
        _must(done.stderr.data == b"end\n" and not done.stderr.truncated, "the other stream is whole")


async def endless_output_is_stopped(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        done = await sandbox.run(["sh", "-c", "while :; do head -c 1000000 /dev/zero; done"], output_limit=100)
        _must(done.killed_by == Aspect.OUTPUT and done.exit is None, f"killed for its output: {done}")
        _must(done.stdout.total < 64 * MIB, f"soon after output_bytes: {done.stdout.total}")
        again = await sandbox.run(["sh", "-c", "echo on"])
        _must(again.stdout.data == b"on\n", "the sandbox lives on")


async def time_is_bounded(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        for timeout_s in _TRIED_S:
            done = await sandbox.run(["sh", "-c", "echo before; sleep 1000"], timeout_s=timeout_s)
            _must(done.timed_out and done.killed_by == Aspect.WALL_TIME and done.exit is None, f"out of time: {done}")
            if done.stdout.data:
                break
        _must(done.stdout.data == b"before\n", "what it wrote before is kept")
        again = await sandbox.run(["sh", "-c", "echo on"])
        _must(again.stdout.data == b"on\n", "the sandbox lives on")


async def a_cancelled_run_ends(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        run = asyncio.ensure_future(sandbox.run(["sh", "-c", "echo > began; sleep 1000"]))
        while await _refused(sandbox.read_file("began"), FileNotFoundError):
            _must(not run.done(), "the run goes on")
        run.cancel()
        _must(await _refused(asyncio.wait_for(run, 120), asyncio.CancelledError), "a cancelled run ends")


async def a_borrower_works_and_lets_go(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        access = sandbox.access()
        _must(access.connection.provider_config_ref == provider.name, "the access names the provider")
        borrowed = await provider.attach(access.connection.descriptor)
        _must(borrowed.sandbox_id == sandbox.sandbox_id and borrowed.workdir == access.workdir, "the same sandbox")
        _must(not hasattr(borrowed, "stop"), "a borrower has nothing to stop it with")
        await borrowed.run(["sh", "-c", "echo borrowed > file"])
        _must(await sandbox.read_file("file") == b"borrowed\n", "owner and borrower see the same files")
        await borrowed.disconnect()
        await borrowed.disconnect()
        _must(await _refused(borrowed.run(["true"]), SandboxLost), "who let go cannot run")
        done = await sandbox.run(["cat", "file"])
        _must(done.stdout.data == b"borrowed\n", "the owner's sandbox goes on after that")


async def a_borrower_needs_the_right_descriptor(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        good = dict(sandbox.access().connection.descriptor)
        wrong: list[Mapping[str, Any]] = [{}, {**good, "token": "x"}, {**good, "sandbox_id": "../../etc"}, {"token": 1}]
        for descriptor in wrong:
            _must(await _refused(provider.attach(descriptor), Forbidden), f"attach({descriptor}) is refused")
        unknown = {**good, "sandbox_id": "0" * 16}
        _must(await _refused(provider.attach(unknown), SandboxLost), "an unknown sandbox is lost")


async def stopping_ends_everybody(provider: SandboxProvider) -> None:
    sandbox = await provider.create(SandboxSpec(limits=SMALL, lease_s=300))
    try:
        borrowed = await provider.attach(sandbox.access().connection.descriptor)
        run = asyncio.ensure_future(borrowed.run(["sh", "-c", "echo > began; sleep 1000"]))
        while await _refused(sandbox.read_file("began"), FileNotFoundError):
            _must(not run.done(), "the run goes on")
    finally:
        await sandbox.stop()
    try:
        done = await asyncio.wait_for(run, 120)
        _must(done.killed_by == "stop" or done.exit not in (None, 0), f"a borrower's run ends with the sandbox: {done}")
    except TopropeError:
        pass  # said as a lost sandbox
    await sandbox.stop()
    _must(await _refused(sandbox.run(["true"]), SandboxLost), "a stopped sandbox is lost for its owner")
    _must(await _refused(borrowed.run(["true"]), SandboxLost), "and for the borrower")
    _must(await _refused(sandbox.read_file("began"), SandboxLost), "its files too")


async def a_lease_ends(provider: SandboxProvider) -> None:
    for lease_s in _TRIED_S:
        sandbox = await provider.create(SandboxSpec(limits=SMALL, lease_s=lease_s))
        try:
            began = await _a_run_ends_with_the_lease(sandbox)
            _must(await _refused(sandbox.run(["true"]), SandboxLost), "none starts after it")
            _must(sandbox.sandbox_id in await provider.reap(), "reap takes it")
            _must(sandbox.sandbox_id not in await provider.reap(), "once")
        finally:
            await sandbox.stop()
        if began:
            return
    raise Nonconforming(f"no run began within {_TRIED_S[-1]} s")


async def _a_run_ends_with_the_lease(sandbox: Sandbox) -> bool:
    """Whether a run was seen to have begun before the lease was over: on a busy machine none may."""
    run = asyncio.ensure_future(sandbox.run(["sh", "-c", "echo > began; sleep 1000"]))
    began = False
    while not run.done():
        try:
            began = began or bool(await sandbox.read_file("began"))
        except (FileNotFoundError, SandboxLost):
            pass  # not yet, or no more
        await asyncio.wait({run}, timeout=0.05)
    try:
        done = run.result()
    except SandboxLost:
        return began  # said as a lost sandbox
    _must(done.killed_by == "lease" or done.exit not in (None, 0), f"no run outlives the lease: {done}")
    return began


async def reaping_leaves_the_living_alone(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        _must(sandbox.sandbox_id not in await provider.reap(), "a sandbox with a living owner is not reaped")
        done = await sandbox.run(["sh", "-c", "echo on"])
        _must(done.stdout.data == b"on\n", "it works on")


async def the_report_is_complete_and_require_limits_reads_it(provider: SandboxProvider) -> None:
    report = await provider.enforces()
    _must(set(report) == set(Aspect), f"every aspect has a line: {sorted(report)}")
    for aspect, line in report.items():
        call = require_limits(provider, [aspect])
        if line.mechanism is None:
            _must(bool(line.note), f"{aspect} is not held and nobody says why")
            _must(await _refused(call, ConfigError), f"require_limits({aspect}) refuses")
        else:
            await call
    _must(await _refused(require_limits(provider, ["colour"]), ConfigError), "an unknown aspect is refused")


async def memory_is_held(provider: SandboxProvider) -> None:
    async with _sandbox(provider) as sandbox:
        done = await sandbox.run(["python3", "-c", "x = bytearray(b'x' * 400_000_000); print(len(x))"])
        _must(done.exit != 0 and b"400000000" not in done.stdout.data, f"400 MB in a sandbox of 96: {done}")


async def the_network_is_held(provider: SandboxProvider) -> None:
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('reached')"
    try:
        async with _sandbox(provider) as sandbox:
            done = await sandbox.run(["python3", "-c", program])
            _must(done.exit != 0 and b"reached" not in done.stdout.data, f"a server of the host was reached: {done}")
    finally:
        server.close()


CHECKS: tuple[Check, ...] = (
    a_run_gives_exit_output_and_errors,
    a_run_works_in_the_work_directory,
    files_go_in_and_come_out,
    files_outside_are_refused,
    a_pipe_in_the_way_blocks_nobody,
    environment_is_only_what_was_given,
    output_is_bounded_and_the_cut_is_said,
    endless_output_is_stopped,
    time_is_bounded,
    a_cancelled_run_ends,
    a_borrower_works_and_lets_go,
    a_borrower_needs_the_right_descriptor,
    stopping_ends_everybody,
    a_lease_ends,
    reaping_leaves_the_living_alone,
    the_report_is_complete_and_require_limits_reads_it,
)

HELD: Mapping[Aspect, Check] = {Aspect.MEMORY: memory_is_held, Aspect.NETWORK: the_network_is_held}
