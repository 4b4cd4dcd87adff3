"""reasoning-gym as an environment: any of its data sets by name, scored by the data set's own scorer.

A task carries its entry in `task_data`, so that `verify` needs no state and rows can be scored again later. Entries
that JSON changes in a way that matters to their scorer (tuples that it compares with `==`) carry their index instead
and are made again from name, parameters and seed. How an answer is found in the model's text is in `answers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from reasoning_gym.factory import DATASETS, create_dataset

from toprope.canonical import json
from toprope.catalog.answers import extract_answer
from toprope.errors.tree import ConfigError, ToolError
from toprope.protocol.episode import Task
from toprope.protocol.ids import TaskId
from toprope.servers.resources.environment import Environment, Verdict, final_text
from toprope.tools.spec import ToolSpec, tool

_INTEGER_LIMIT = 10**30


class ReasoningGym(Environment):
    """`ReasoningGym(dataset="basic_arithmetic", params={"max_terms": 2}, tool="add", system="...")`.

    `params` are the data set's own settings; its size and seed come from the task source. With `tool: add` each task
    offers one strict function, the sum of two integers, and forces it on the first turn. `create_params` are
    further fields of `responses_create_params`, such as `max_output_tokens` and `temperature`.
    """

    def __init__(
        self,
        *,
        dataset: str,
        params: Mapping[str, Any] | None = None,
        tool: Literal["add"] | None = None,
        system: str | None = None,
        create_params: Mapping[str, Any] | None = None,
    ) -> None:
        if dataset not in DATASETS:
            raise ConfigError(f"dataset: {dataset!r} is no data set of reasoning-gym; accepted: {', '.join(DATASETS)}")
        if tool not in (None, "add"):
            raise ConfigError(f"tool: {tool!r} is not offered; accepted: add, or none")
        reserved = {"size", "seed"} & set(params or {})
        if reserved:
            raise ConfigError(f"params.{min(reserved)}: size and seed belong to the task source (run.tasks)")
        self.dataset = dataset
        self.params = dict(params or {})
        self.tool = tool
        self.system = system
        self.create_params = dict(create_params or {})
        self._sources: dict[tuple[int, int], Any] = {}
        self._source(1, 0)  # a wrong parameter is refused here, not at the first task

    @property
    def tools(self) -> Mapping[str, ToolSpec]:
        """`add` if it was asked for."""
        return {name: spec for name, spec in self.class_tools.items() if name == self.tool}

    @tool
    def add(self, state: None, a: int, b: int) -> int:
        """Add two integers and return their sum."""
        if max(abs(a), abs(b)) > _INTEGER_LIMIT:
            raise ToolError("the integers are beyond 10^30")
        return a + b

    def tasks(self, size: int, seed: int) -> Iterable[Task]:
        """`size` tasks of the data set; the same `seed` gives the same tasks."""
        source = self._source(size, seed)
        for index in range(size):
            yield self._task(source, index, size, seed)

    def verify(self, state: None, task: dict[str, Any], response: dict[str, Any]) -> Verdict:
        """The data set's own score of the extracted answer, between 0 and 1."""
        source = self._source(int(task["source_size"]), int(task["source_seed"]))
        entry = task["entry"] if "entry" in task else source[int(task["source_index"])]
        answer = extract_answer(final_text(response), entry["answer"])
        score = float(source.score_answer(answer, entry))
        if not math.isfinite(score):
            raise ValueError(f"the scorer of {self.dataset} gave {score} for the answer {answer!r}")
        return Verdict(reward=score, extra={"extracted_answer": answer, "expected_answer": entry["answer"]})

    def _task(self, source: Any, index: int, size: int, seed: int) -> Task:
        entry = source[index]
        data: dict[str, Any] = {"source_index": index, "source_size": size, "source_seed": seed}
        if self._survives_json(source, entry):
            data["entry"] = entry
        turns = [("system", self.system), ("user", entry["question"])]
        params: dict[str, Any] = {
            "input": [{"type": "message", "role": role, "content": text} for role, text in turns if text is not None],
            **self.create_params,
        }
        if self.tool is not None:
            params["tools"] = self.tool_list(strict=True)
            params["tool_choice"] = {"type": "function", "name": self.tool}
            params["parallel_tool_calls"] = False
        task_id = TaskId(self.dataset, f"{seed}-{index}")
        return Task(task_id, json.loads(json.dumps({"responses_create_params": params, "task_data": data})))

    def _survives_json(self, source: Any, entry: Mapping[str, Any]) -> bool:
        try:
            copy = json.loads(json.dumps(entry))
        except json.NotJson:
            return False
        if copy == entry:
            return True
        answer = entry["answer"]
        try:
            return bool(source.score_answer(answer, copy) == source.score_answer(answer, entry))
        except Exception:  # a scorer that cannot read the copy is served from the data set itself
            return False

    def _source(self, size: int, seed: int) -> Any:
        if (size, seed) not in self._sources:
            try:
                self._sources[size, seed] = create_dataset(self.dataset, size=size, seed=seed, **self.params)
            except (TypeError, AssertionError, ValueError) as error:
                raise ConfigError(f"params: {self.dataset} refuses its parameters {self.params}: {error}") from error
        return self._sources[size, seed]
