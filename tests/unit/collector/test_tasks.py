"""Tasks in: what is read, what is imported, what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toprope.collector.tasks import SourceTask, read_tasks
from toprope.errors.tree import ConfigError
from toprope.protocol.episode import RESERVED_TASK_DATA, Task
from toprope.protocol.ids import TaskId

MATERIALISED = {
    "task_id": {"taskset": "sums", "task_id": "7"},
    "task_input": {"responses_create_params": {"input": "x"}},
}
FLAT = {"responses_create_params": {"input": [{"role": "user", "content": "2+2"}]}, "answer": "4"}


def file_of(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_bytes(data)
    return path


def read_one(tmp_path: Path, row: dict[str, object]) -> SourceTask:
    [task] = read_tasks(file_of(tmp_path, json.dumps(row).encode()))
    return task


def test_a_materialised_row_keeps_its_identity_and_input(tmp_path: Path) -> None:
    task = read_one(tmp_path, MATERIALISED)
    assert (task.taskset, task.task_id) == ("sums", "7")
    assert task.task_input == {"responses_create_params": {"input": "x"}}


def test_a_flat_row_is_folded_into_task_data_and_named_by_its_file(tmp_path: Path) -> None:
    task = read_one(tmp_path, FLAT)
    assert (task.taskset, task.task_id) == ("data", None)
    assert task.task_input == {"responses_create_params": FLAT["responses_create_params"], "task_data": {"answer": "4"}}


def test_a_flat_rows_own_task_id_stays_in_its_data_and_names_the_task(tmp_path: Path) -> None:
    task = read_one(tmp_path, {**FLAT, "task_id": 18446744073709551617})
    assert task.task_id == "18446744073709551617"
    assert task.task_input["task_data"]["task_id"] == 18446744073709551617


def test_routing_and_ng_keys_keep_their_meaning_and_leave_the_task(tmp_path: Path) -> None:
    row = {**FLAT, "agent_ref": {"name": "solver"}, "_ng_rollout_id": "4", "_ng_task_index": 9, "_ng_rollout_index": 2}
    task = read_one(tmp_path, row)
    assert (task.taskset, task.rollout_id, task.task_index, task.rollout_index) == ("solver", "4", 9, 2)
    assert task.routing == {"agent_ref": {"name": "solver"}}
    assert task.task_input["task_data"] == {"answer": "4"}
    assert read_one(tmp_path, {**row, "task_source": "gsm"}).taskset == "gsm"


def test_a_row_written_by_a_run_can_be_a_task_again(tmp_path: Path) -> None:
    row = {**FLAT, "_ng_attempt_index": 3, "_ng_schema": 1, "_ng_task_id": {"taskset": "sums", "task_id": "5"}}
    task = read_one(tmp_path, row)
    assert (task.taskset, task.task_id) == ("sums", "5")


def test_python_rows_of_every_shape_are_read() -> None:
    rows = [MATERIALISED, FLAT, Task(TaskId("a", "b"), {"x": 1}), SourceTask("here", "s", "t", {})]
    assert [task.taskset for task in read_tasks(iter(rows), taskset="mine")] == ["sums", "mine", "a", "s"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{nope", "not JSON"),
        (b'{"responses_create_params": {"seed": 1, "seed": 2}}', "the key 'seed' stands twice"),
        (b'{"responses_create_params": {}, "responses_create_params": {}}', "'responses_create_params' stands twice"),
        (b'{"a":' * 995 + b"1" + b"}" * 995, "not JSON"),
        (b'{"responses_create_params": {"temperature": NaN}}', "NaN"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"x": 1}', "responses_create_params is missing"),
        (b'{"responses_create_params": []}', "is list, not an object"),
        (b'{"task_id": {"taskset": "a"}, "task_input": {}}', "task_id must be"),
        (b'{"task_id": {"taskset": "a", "task_id": "b"}, "task_input": 3}', "task_input must be an object"),
        (b'{"task_id": {"taskset": "a", "task_id": "b"}, "task_input": {}, "extra": 1}', "'extra'"),
        (b'{"responses_create_params": {}, "reward": 1}', "'reward'"),
        (b'{"responses_create_params": {}, "response": {}}', "'response'"),
        *(
            (b'{"responses_create_params": {}, "%s": 1}' % name.encode(), repr(name))
            for name in sorted(RESERVED_TASK_DATA - {"responses_create_params"})
        ),
        (b'{"responses_create_params": {}, "_ng_new": 1}', "'_ng_new'"),
        (b'{"responses_create_params": {}, "_ng_task_index": -1}', "_ng_task_index is -1"),
        (b'{"responses_create_params": {}, "_ng_rollout_id": [1]}', "_ng_rollout_id is [1]"),
        (b'{"task_id":{"taskset":"a","task_id":"b"},"task_input":{"k":1,"task_data":{"k":2}}}', "two values"),
        (b'{"a": "\xff"}', "not JSON"),
    ],
)
def test_a_malformed_line_is_refused_with_file_line_and_reason(tmp_path: Path, line: bytes, says: str) -> None:
    path = file_of(tmp_path, json.dumps(FLAT).encode() + b"\n" + line + b"\n")
    with pytest.raises(ConfigError) as refused:
        list(read_tasks(path))
    assert "data.jsonl, line 2" in refused.value.message
    assert says in refused.value.message


def test_a_blank_line_between_tasks_is_refused_and_at_the_end_is_not(tmp_path: Path) -> None:
    row = json.dumps(FLAT).encode()
    assert len(list(read_tasks(file_of(tmp_path, row + b"\n\n\n")))) == 1
    with pytest.raises(ConfigError, match="line 2: a blank line"):
        list(read_tasks(file_of(tmp_path, row + b"\n\n" + row)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        list(read_tasks(tmp_path / "missing.jsonl"))


def test_an_item_that_is_no_mapping_is_refused_by_its_place() -> None:
    with pytest.raises(ConfigError, match="task 1: expected a mapping, got int"):
        list(read_tasks([FLAT, 3]))  # type: ignore[list-item]
