"""The log of model calls: shared by writers, read past damage, and never the reason why a call fails."""

from __future__ import annotations

import os

from toprope.telemetry.calls import CallLog, ModelCallRecord, read_call_log


def record(call_id, **more):
    return ModelCallRecord(call_id=call_id, server="policy", dialect="chat", started=1.0, ended=2.5, status=200, **more)


def test_what_was_written_is_read_back_by_field(tmp_path):
    log, other = CallLog(tmp_path / "logs" / "calls.jsonl"), CallLog(tmp_path / "logs" / "calls.jsonl")
    first = record("a", rollout_id="4-2", captured=True, input_tokens=3, losses=("tools.web_search",))
    log.write(first)
    other.write(record("b", error="model_auth", error_message="line\u2028\nbreak"))
    log.close()
    other.close()
    assert list(read_call_log(log.path)) == [first, record("b", error="model_auth", error_message="line\u2028\nbreak")]
    assert next(read_call_log(log.path)).output_tokens is None


def test_a_torn_or_foreign_line_is_passed_over(tmp_path):
    log = CallLog(tmp_path / "calls.jsonl")
    log.write(record("a"))
    log.close()
    with open(log.path, "ab") as damage:
        damage.write(b'{"torn": \n[]\n\n')
    again = CallLog(log.path)
    again.write(record("b"))
    again.close()
    assert [r.call_id for r in read_call_log(log.path)] == ["a", "b"]


def test_a_disk_that_refuses_a_line_costs_the_line_and_is_counted(tmp_path):
    log = CallLog(tmp_path / "calls.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    os.close(full)
    log.write(record("a"))
    log.close()
    log.write(record("b"))
    log.close()
    assert log.lost == 2


def test_a_lone_surrogate_in_a_message_loses_nothing_but_its_line(tmp_path):
    log = CallLog(tmp_path / "calls.jsonl")
    log.write(record("a", error_message="\ud835"))
    log.write(record("b"))
    log.close()
    assert [r.call_id for r in read_call_log(log.path)] == ["b"]
