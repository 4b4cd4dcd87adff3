"""The summary of a run: a pure function of the files in its directory, so that a live run, a resumed one and a later
reader agree key by key.

Left to others: the arithmetic (`metrics`), what became of each rollout (`results.account`), tables (`cli`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from toprope.collector.metrics import PassAtK, Spread, TaskSpread, average_of_k, over_tasks, passes, spread
from toprope.results.account import Account, Coverage, take_account
from toprope.results.layout import RunDir
from toprope.results.read import ResultHead
from toprope.storage.atomic import replace_file


class CoverageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The identity, its share and whether the threshold was reached."""

    expected: int
    measured: int
    masked: int
    failed: int
    omitted: int
    unknown: int
    share: float
    threshold: float
    reached: bool


class Masks(msgspec.Struct, frozen=True, kw_only=True):
    """Masked rows: by capture (with its reasons), by the environment; a row masked by both counts in each."""

    capture: int
    environment: int
    reasons: dict[str, int]


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """`rollouts` that ended without verdict, by kind; `rows` counts attempts, retried ones too."""

    rollouts: int
    rows: int
    kinds: dict[str, int]
    row_kinds: dict[str, int]
    commonest: str | None = None
    commonest_reason: str | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the rows that carry capture metrics.

    `too_large` rows hold a native trace because their items would pass the size limit; `raw_logprobs_differ` rows carry
    raw logprobs of a policy that sampled with other settings.
    """

    rows: int
    calls: int
    generated_captured: int
    generated_delivered: int
    truncated: int
    too_large: int = 0
    raw_logprobs_differ: int = 0


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One declared number: over all measured rollouts, and over tasks."""

    rollouts: Spread
    tasks: TaskSpread


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One task: its measured rewards, and how many of its rollouts were masked."""

    task_index: int
    taskset: str
    task_id: str
    masked: int
    passed: int
    reward: Spread | None


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a set of tasks."""

    measures: dict[str, Measure]
    pass_at_k: list[PassAtK]
    pass_at_1_avg_of_k: PassAtK | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `summary.json` holds."""

    run_id: str
    name: str
    coverage: CoverageReport
    exit_status: int
    stop_reason: str
    message: str
    metrics: Metrics
    tasksets: dict[str, Metrics]
    groups: list[Group]
    masks: Masks
    failures: Failures
    tokens: Tokens
    dispatches: int
    starts: int
    damage: list[str] = []


class _Tally:
    """What one pass over the result heads gathers."""

    def __init__(self) -> None:
        self.rewards: dict[int, list[float]] = {}
        self.components: dict[str, dict[int, list[float]]] = {}
        self.tasks: dict[int, tuple[str, str]] = {}
        self.masked: Counter[int] = Counter()
        self.by_capture = 0
        self.by_environment = 0
        self.reasons: Counter[str] = Counter()
        self.rows = self.calls = self.captured = self.delivered = self.truncated = 0
        self.too_large = self.raw_differ = 0

    def add(self, head: ResultHead) -> None:
        self.tasks[head.task_index] = (head.task.taskset, head.task.task_id)
        if head.capture is not None:
            self.rows += 1
            self.calls += head.capture.n_calls
            self.captured += head.capture.generated_tokens_captured
            self.delivered += head.capture.generated_tokens_delivered
            self.truncated += head.capture.truncated
            self.too_large += head.capture.projected_bytes is not None
            self.raw_differ += bool(head.capture.raw_logprobs_differ)
        if head.mask_sample:
            self._add_masked(head)
            return
        self.rewards.setdefault(head.task_index, []).append(head.reward)
        for name, value in head.components().items():
            self.components.setdefault(name, {}).setdefault(head.task_index, []).append(value)

    def _add_masked(self, head: ResultHead) -> None:
        self.masked[head.task_index] += 1
        reasons = head.capture.mask_reasons if head.capture is not None else []
        self.reasons.update({reason.partition(":")[0] for reason in reasons})
        self.by_capture += "capture" in head.masked_by
        self.by_environment += "environment" in head.masked_by


def summarise(run_dir: RunDir) -> Summary:
    """Read the run's files and sum them up. Blocks: not for an event loop. Writes nothing."""
    run_dir.require_run()
    tally = _Tally()
    account = take_account(run_dir, tally.add)
    threshold = account.manifest.pass_threshold
    failures = _failures(account)
    coverage = _coverage(account.coverage(), account.manifest.min_coverage)
    names = sorted({taskset for taskset, _ in tally.tasks.values()})
    return Summary(
        run_id=account.manifest.run_id,
        name=account.manifest.name,
        coverage=coverage,
        exit_status=_exit_status(account, coverage),
        stop_reason=account.end.reason if account.end is not None else "killed",
        message=_message(account, coverage, failures) + _about_tokens(tally),
        metrics=_metrics(tally, threshold, set(tally.tasks)),
        tasksets={
            name: _metrics(tally, threshold, {index for index, task in tally.tasks.items() if task[0] == name})
            for name in names
        },
        groups=[_group(tally, index, threshold) for index in sorted(tally.tasks)],
        masks=Masks(
            capture=tally.by_capture, environment=tally.by_environment, reasons=dict(sorted(tally.reasons.items()))
        ),
        failures=failures,
        tokens=Tokens(
            rows=tally.rows,
            calls=tally.calls,
            generated_captured=tally.captured,
            generated_delivered=tally.delivered,
            truncated=tally.truncated,
            too_large=tally.too_large,
            raw_logprobs_differ=tally.raw_differ,
        ),
        dispatches=account.dispatches,
        starts=account.starts,
        damage=[str(damage) for damage in account.damage],
    )


def write_summary(run_dir: RunDir, summary: Summary) -> None:
    """On return summary.json holds `summary`, whole. Blocks: not for an event loop."""
    replace_file(run_dir.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _coverage(counts: Coverage, threshold: float) -> CoverageReport:
    verdicts = counts.measured + counts.masked
    return CoverageReport(
        expected=counts.expected,
        measured=counts.measured,
        masked=counts.masked,
        failed=counts.failed,
        omitted=counts.omitted,
        unknown=counts.unknown,
        share=counts.share,
        threshold=threshold,
        reached=counts.share >= threshold and verdicts > 0,
    )


def _exit_status(account: Account, coverage: CoverageReport) -> int:
    reason = account.end.reason if account.end is not None else "killed"
    if reason == "interrupted":
        return 130
    return 0 if coverage.reached and reason in ("done", "budget") else 1


def _message(account: Account, coverage: CoverageReport, failures: Failures) -> str:
    text = (
        f"{coverage.measured + coverage.masked} of {coverage.expected} rollouts have a verdict "
        f"({coverage.measured} measured, {coverage.masked} masked); {coverage.failed} failed, "
        f"{coverage.omitted} not started, {coverage.unknown} without outcome."
    )
    if account.end is not None and account.end.message:
        text = f"{account.end.message} {text}"
    if failures.commonest is not None:
        text += f" Commonest failure: {failures.commonest} ({failures.kinds[failures.commonest]} times): "
        text += f"{failures.commonest_reason}"
    return text


def _about_tokens(tally: _Tally) -> str:
    """What a trainer must know of the rows before it reads them."""
    text = ""
    if tally.too_large:
        text += f" {tally.too_large} rows are too large for items and hold a native trace (format: trace)."
    if tally.raw_differ:
        text += (
            f" {tally.raw_differ} rows carry raw logprobs although temperature, top_p or top_k made the sampling policy"
            " another one."
        )
    return text


def _failures(account: Account) -> Failures:
    kinds = account.failed_kinds()
    # Ties go to the first in the alphabet, so that two readers name the same one.
    commonest = min(kinds, key=lambda kind: (-kinds[kind], kind), default=None)
    return Failures(
        rollouts=kinds.total(),
        rows=account.failure_rows,
        kinds=dict(sorted(kinds.items())),
        row_kinds=dict(sorted(account.failure_kinds.items())),
        commonest=commonest,
        commonest_reason=account.reasons[commonest] if commonest is not None else None,
    )


def _metrics(tally: _Tally, threshold: float, tasks: set[int]) -> Metrics:
    rewards = {index: tally.rewards[index] for index in sorted(tasks & tally.rewards.keys())}
    measures = {}
    for name, groups in {"reward": rewards, **dict(sorted(tally.components.items()))}.items():
        measure = _measure({index: groups[index] for index in sorted(tasks & groups.keys())})
        if measure is not None:
            measures[name if name == "reward" else f"reward_components.{name}"] = measure
    return Metrics(
        measures=measures,
        pass_at_k=passes(rewards, threshold),
        pass_at_1_avg_of_k=average_of_k(rewards, threshold),
    )


def _measure(groups: Mapping[int, Sequence[float]]) -> Measure | None:
    rollouts = spread([value for group in groups.values() for value in sorted(group)])
    spreads = [spread(sorted(group)) for group in groups.values()]
    tasks = over_tasks(each.mean for each in spreads if each is not None)
    return None if rollouts is None or tasks is None else Measure(rollouts=rollouts, tasks=tasks)


def _group(tally: _Tally, index: int, threshold: float) -> Group:
    taskset, task_id = tally.tasks[index]
    rewards = sorted(tally.rewards.get(index, ()))
    return Group(
        task_index=index,
        taskset=taskset,
        task_id=task_id,
        masked=tally.masked[index],
        passed=sum(value >= threshold for value in rewards),
        reward=spread(rewards),
    )
