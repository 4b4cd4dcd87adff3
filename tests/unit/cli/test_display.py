"""What people read: tables, conversations, progress lines, errors."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from toprope.cli.conversation import render
from toprope.cli.progress import JsonLines, PlainLines, news
from toprope.cli.reporting import reporting
from toprope.cli.tables import age, columns
from toprope.collector.events import Dispatched, Finished, Retrying, RunStarted, Stopping
from toprope.errors.tree import CaptureError, ConfigError, EngineUnavailable
from toprope.telemetry.calls import ModelCallRecord

STARTED = RunStarted("r1", "runs/x", 2, 2, 4, 16)


def test_columns_line_up_and_numbers_stand_to_the_right() -> None:
    assert columns(["name", "n"], [("a", 5), ("long name", 12), ("x\ny", None)]) == (
        "name        n\n---------  --\na           5\nlong name  12\nx y         -\n"
    )
    assert columns(["only", "heads"], []) == "only  heads\n----  -----\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (352_800, "4 d 2 h")],
)
def test_spans_are_said_in_the_units_people_use(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_plain_progress_tells_the_start_and_every_failure_at_once() -> None:
    out = io.StringIO()
    lines = PlainLines(out)
    for event in (
        STARTED,
        Dispatched("r1.0-0", 0),
        Retrying("r1.0-0", 0, "agent_timeout", "too\nslow", 1.5),
        Dispatched("r1.0-0", 1),
        Finished("r1.0-0", 1, 0, "failed", 2.0, kind="verify_failed", reason="ValueError: no"),
        Stopping("interrupted", ""),
    ):
        lines(event)
    assert out.getvalue().splitlines() == [
        "run r1: 2 tasks x 2, 16 at once, in runs/x",
        "retry of r1.0-0 in 1.5 s (agent_timeout): too slow",
        "failed r1.0-0 (verify_failed): ValueError: no",
        "stopping (interrupted): nothing more is started. Calls under way are closed first; Ctrl-C again ends at once.",
    ]


def test_json_progress_names_each_event() -> None:
    out = io.StringIO()
    JsonLines(out)(STARTED)
    event = json.loads(out.getvalue())
    assert (event["event"], event["run_id"], event["expected"]) == ("run_started", "r1", 4)


def test_a_long_reason_is_cut_in_the_middle_so_that_its_root_cause_stays() -> None:
    text = news(Finished("r", 0, 0, "failed", 1.0, kind="internal", reason="x" * 5000 + " the root cause"))
    assert " ... " in text
    assert text.endswith("the root cause")
    assert len(text) < 260


ROW: dict[str, Any] = {
    "_ng_rollout_id": "r1.0-0",
    "_ng_attempt_index": 1,
    "_ng_task_id": {"taskset": "sums", "task_id": "7-0"},
    "entry": {"answer": "5"},
    "responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]}]},
    "response": {
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "function_call",
                "name": "add",
                "arguments": '{"a":2}',
                "call_id": "c1",
                "prompt_token_ids": [1, 2, 3],
                "generation_token_ids": [4, 5],
                "generation_log_probs": [-1.0, 0.0],
                "grammar_forced": [False, True],
            },
            {"type": "function_call_output", "call_id": "c1", "output": "b is missing"},
            {"type": "message", "role": "assistant", "content": "5\nor so"},
            {"type": "web_search_call"},
        ]
    },
    "ng_agent_observations": {"records": [{"kind": "tool_call", "name": "add", "call_id": "c1", "duration_s": 0.002}]},
    "reward": 1.0,
    "mask_sample": True,
    "extracted_answer": "5",
    "_ng_token_capture": {"mask_reasons": ["several_roots"]},
}


def test_a_rollout_reads_as_a_conversation() -> None:
    call = ModelCallRecord(call_id="x", server="policy", dialect="chat", started=1.0, ended=1.5, status=200)
    text = render(ROW, {"task_data": {"entry": {}}}, [call])
    for part in (
        "rollout r1.0-0, attempt 1, task sums 7-0",
        "      user  2 + 3?",
        "   thought  hm",
        ' assistant  add({"a":2})',
        "[3 prompt tokens, 2 sampled, 1 of them by grammar, mean logprob -0.500]",
        "      tool  add: error, 2.0 ms",
        "      tool  b is missing",
        " assistant  5\n            or so",
        "web_search_call  (an item of a kind that is not shown)",
        "reward 1.0, masked",
        "  extracted_answer: 5",
        "  masked by capture: several_roots",
        "0.500 s",
    ):
        assert part in text
    assert "entry" not in text, "what the task itself holds is not said again"


def test_a_failed_rollout_says_where_why_and_whether_again() -> None:
    failed = {
        **{key: ROW[key] for key in ("_ng_rollout_id", "_ng_attempt_index", "_ng_task_id")},
        "failure_kind": "agent_timeout",
        "stage": "agent",
        "terminal": False,
        "failure_reason": "no reply within 3 s",
    }
    text = render(failed, {"responses_create_params": {"input": "hello"}}, [])
    assert "user  hello" in text
    assert "failed: agent_timeout at agent; it could be tried again\n  no reply within 3 s" in text


@pytest.mark.promise("UX-2")
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("a.yaml: run: no"), 2, "toprope: a.yaml: run: no\n"),
        (EngineUnavailable("http://x is\ngone"), 2, "toprope: http://x is gone\n"),
        (CaptureError("disk full"), 1, "toprope: disk full\n"),
        (KeyboardInterrupt(), 130, "toprope: interrupted\n"),
        (ZeroDivisionError("by zero"), 1, "toprope: internal error: ZeroDivisionError: by zero. Run again with"),
    ],
)
def test_what_escapes_a_command_is_one_paragraph_and_a_status(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, reporting(debug=False):
        raise error
    assert ended.value.code == status
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert told.count("\n") == 1
