"""Steps, loss and speed read from what trainings print: one table of patterns, values under the names of metrics.

`ProgressReader` turns the lines that `progress_lines.find_lines` picks, in the order of their arrival, into rows. A
step that no line states is unknown, never counted.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable

from ascendrun.core.logs.progress_lines import TOTAL_MARKS
from ascendrun.core.logs.progress_values import NUM, EpochHeading, Row, StepCounter, is_prefix, is_record, named, number

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PAIR = re.compile(rf"""["']([\w/(). %-]+)["']\s*:\s*["']?(\d+/\d+|{NUM}|[^,"'{{}}\[\]]+)""", re.I)
_BAR = re.compile(
    r"(?P<percent>\d{1,3})%\s*(?:\|[^|]*\|)?\s*(?P<n>\d+)/(?P<total>\d+)\s*"
    r"\[[\d:]+<[^,\]]+,\s*[\d.?]+\s*(?:it|batch(?:es)?|steps?|s)/(?:s|it|batch|step)(?P<values>,[^\]]*)?\]"
)
_RICH = re.compile(
    r"^\s*(?P<name>[^━╸╺─]*?)(?:\s+\d+%)?\s*[━╸╺─]{2}[━╸╺─ ]*(?P<n>\d+)/(?P<total>\d+)\s+\[?\s*[-\d:]+(?P<values>.*)$"
)
_TRAINING_BAR = re.compile(r"(?:train(?:ing)?|(?:global[ _])?steps?|iter(?:ation)?s?)(?: steps?)?", re.I)
_LOSS_NAME = re.compile(rf"loss\s*[:=]?\s*({NUM})", re.I)
_EPOCH_BAR = re.compile(r"(?:train(?:ing)?\s*)?epoch\s*:?\s*\[?(\d+)(?:\s*/\s*(\d+))?\]?", re.I)
_NOT_TRAINING = re.compile(r"(?:^|[^a-z])(?:val|valid|eval|test|sanity|predict|infer)", re.I)
_TOTAL = re.compile(
    r"(?:(?:optimization steps[^=:]{0,40}|\bmax_(?:iters|steps)['\"]?\s*)[=:]|\btotal steps[=:]?)\s*([1-9][\d,]*)", re.I
)
_HEADING = re.compile(r"\s*Epoch (\d+)/(\d+)\s*")
_COUNT = re.compile(r"\s*(?P<n>\d+)/(?P<total>\d+) (?P<bar>━[━ ]*|\[[=>.]+\] |)(?P<values>.*)$")
"""The counter of the epoch whose heading is above it."""
_TABLE = re.compile(rf"\|\s*(total_timesteps|loss)\s*\|\s*({NUM})\s*\|", re.I)
_ITERATION = re.compile(r"\biteration:?\s+(\d+)\s*/\s*(\d+)\b(?=(.*(?:elapsed time|consumed samples|loss).*))", re.I)
_FIELD = re.compile(rf"\s*([^:|]+?)\s*:\s*((?:{NUM})[KMG]?)\s*\S*\s*", re.I)
_DEEPSPEED = re.compile(r"\bstep=(\d+), skipped=\d+, lr=\[([^\],]+)")
_TIMER = re.compile(
    r"(?:global_step=(\d+)|\b\d+/\d+), (?:RunningAvg)?SamplesPerSec=([\d.]+)(?:, CurrSamplesPerSec=([\d.]+))?"
)
_EVALUATION = re.compile(
    rf"(?:\bstep (?P<a>\d+): train loss (?:{NUM}), val loss (?P<b>{NUM})"
    rf"|validation loss at iteration (?P<c>\d+) \| lm loss value: (?P<d>{NUM}))",
    re.I,
)
_STEP = re.compile(
    r"(?:(?:global[ _]?)?\b(?:global_)?(?:step|iter(?:ation)?)s?\s{0,2}[:=#]?\s{0,8}\[?\s{0,8}"
    r"|(?<!\S)(?=\d+/\d+ \(epoch ))(?P<n>\d+)(?:\s{0,8}(?:/|of)\s{0,8}(?P<total>\d+))?(?![\d.\w])(?P<values>\W.*)$",
    re.I,
)
_BATCH = re.compile(
    r"\b(?P<word>epoch|train)\W{0,3}(?P<epoch>\d+)(?:\s?/\s?(?P<epochs>\d+))?\]?[\s,:|-]{0,4}\[?(?:batch|iter|step)?\W{0,3}(?P<n>\d+)\s?/\s?"
    r"(?P<total>\d+)(?P<share>\s?\(\s{0,2}\d+%\))?(?P<values>\W.*)$",
    re.I,
)
_EPOCH_BEFORE = re.compile(r"\bepoch\W{0,3}(\d+(?:\.\d+)?)", re.I)
_VALUE = re.compile(rf"([A-Za-z][\w /.()-]{{0,60}}?)\s*[:=]?\s*(?<![\w.])({NUM})(?![\w.]*[A-Za-z]\w*[:=])", re.I)

_TEXT_MARKS = ("oss", "{", "teration", "PerSec", "skipped=", "━", "─", "timesteps", "Epoch ")
"""One of these is in every text that a parser of lines reads."""


def merge_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, those in succession of one step as one."""
    merged: list[Row] = []
    for row in rows:
        if merged and row.get("step") is not None and merged[-1].get("step") == row["step"]:
            merged[-1] = {**merged[-1], **row}
        else:
            merged.append(row)
    return merged


class ProgressReader:
    """Rows from the lines of one rank, in the order of arrival. `pattern`: the job's own; then no other is used.

    A dictionary of a Hugging Face Trainer has no step: the bar that is drawn again after it has. It waits for that bar
    in `_pending`, and `flush` releases it. A bar without a name is a training's only if the total of steps is known or
    a dictionary with a loss is printed above it: inference and data preparation draw the same bars.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self._own = None if pattern is None else re.compile(pattern)
        self.reads_any_line = pattern is not None
        self._total: int | None = None
        self._bar: tuple[int, int] | None = None
        self._main: int | None = None
        self._early: deque[Row] = deque(maxlen=1000)
        self._newest = 0
        self._pending: Row | None = None
        self._values: dict[str, str] = {}
        self._base: dict[str, int] = {}
        self._drawn: int | None = None
        self._is_ahead: bool | None = None
        self._counter, self._bar_counts = StepCounter(), dict[int, int]()
        self._heading, self._columns = EpochHeading(), list[str]()

    def read(self, raw: bytes) -> list[Row]:
        """Return the rows that a line completes, oldest first; their names are those of a metrics file."""
        line = raw.decode("utf-8", "replace")
        line = _ANSI.sub("", line) if "\x1b" in line else line
        if self._own is not None:
            return self._read_own(self._own, line)
        total = _TOTAL.search(line) if any(mark in line for mark in TOTAL_MARKS) else None
        if total:
            self._total = int(total[1].replace(",", ""))
            if "oss" not in line:
                return []
        rows: list[Row] = []
        bar = _BAR.search(line) if "<" in line else None
        rest, at = line, 0
        while bar:
            start = bar.start()
            named = max(line.rfind(mark, at, start) for mark in "|]}") + 1 or at
            name = line[named:start].strip().rstrip(":").strip()
            rows += self._read_bar(name, bar)
            rest, at = rest.replace(name if "oss" in name else bar[0], " ", 1).replace(bar[0], " ", 1), bar.end()
            bar = _BAR.search(line, at)
        if any(mark in rest for mark in _TEXT_MARKS):
            rows += self._read_text(rest.strip())
        return rows

    def omit(self) -> None:
        """The output that follows is not read up to the next line."""
        self._heading.omit()

    def flush(self) -> list[Row]:
        """Return the row of a dictionary that still waits for its bar, with the step of the bar before it."""
        row, self._pending = self._pending, None
        if row is None:
            return []
        if (
            "step" not in row
            and self._bar is not None
            and self._bar[0]
            and self._bar[1] == (self._main or self._bar[1])
        ):
            row = {"step": self._bar[0], "total_steps": self._bar[1], **row}
            return [*self._confirm(self._bar[1]), row]
        return [self._with_total(row)]

    def _read_own(self, pattern: re.Pattern[str], line: str) -> list[Row]:
        found = pattern.search(line)
        values = {} if found is None else {name: number(text) for name, text in found.groupdict().items() if text}
        row: Row = {name: value for name, value in values.items() if value is not None}
        for name in ("step", "total_steps"):
            if name in row:
                row[name] = int(row[name])
        return [row] if row else []

    # Bars

    def _read_bar(self, name: str, bar: re.Match[str]) -> list[Row]:
        count, total = int(bar["n"]), int(bar["total"])
        in_name = _LOSS_NAME.search(name) if "oss" in name else None
        epoch = _EPOCH_BAR.match(name) if in_name else _EPOCH_BAR.fullmatch(name)
        if in_name and epoch is not None:
            self._base.setdefault("epoch", min(int(epoch[1]), 1))
        name = "" if in_name else name
        is_named = bool(_TRAINING_BAR.fullmatch(name)) or epoch is not None
        # `loss=0.4, v_num=1`, or `loss: 0.4`
        pairs = re.findall(rf"([\w/. ]+)[=:]\s*({NUM})", bar["values"] or "", re.I)
        values = [(key.strip(), value) for key, value in pairs]
        own = named(values) if values else {}
        if in_name:
            own["loss"] = number(in_name[1])
        if name and ((not is_named and "loss" not in own) or _NOT_TRAINING.search(name)):
            return []
        if in_name:
            values = [*values, ("loss", in_name[1])]
        count += self._is_before_count(count, values, own) and count < total
        if epoch is not None:
            return self._epoch_row(epoch, count, total, own)
        if not is_named and "loss" not in own and not in_name:
            return self._plain_bar(count, total)
        before, self._bar_counts[total] = self._bar_counts.get(total, 0), count
        if before < 0 or before > count > 0:  # the bar of another epoch
            self._bar_counts[total] = -1
            return [{**own, "step": None}]
        return self._step_row(count, total, own)

    def _is_before_count(self, count: int, values: list[tuple[str, str]], own: Row) -> bool:
        """Whether a bar shows new values before it counts their step. Of values that it has drawn before, the loss is
        removed from `own`."""
        fresh = {key: text for key, text in values if self._values.get(key) != text}
        is_fresh = any(named([one]).get("loss") is not None for one in fresh.items())
        self._values = dict(values)
        if "loss" not in own:
            self._drawn = count if self._drawn is None else self._drawn
        elif not is_fresh:
            own.pop("loss")  # the bar was drawn again before new values were set
        else:
            if self._is_ahead is None:
                self._is_ahead = count in (0, self._drawn)
            return self._is_ahead
        return False

    def _plain_bar(self, count: int, total: int) -> list[Row]:
        """A bar without a name: confirmed by its total, or by a dictionary that waits for it."""
        before, self._bar = self._bar, (count, total)
        rows: list[Row] = []
        if self._main is None and self._total == total:
            rows += self._confirm(total)
        if self._pending is not None and "step" not in self._pending:
            if self._main is None and (before is None or before[1] == total):
                rows += self._confirm(total)
            if self._main == total and count:
                row, self._pending = {**self._pending, "step": count, "total_steps": total}, None
                return [*rows, *self._step_row(count, total, {}), row]
        if self._main == total:
            return rows + self._step_row(count, total, {})
        if self._main is None and count:
            if self._early and self._early[0]["total_steps"] != total:
                self._early.clear()
            if not self._early or self._early[-1]["step"] < count:
                self._early.append({"step": count, "total_steps": total})
        else:
            self._bar = before if self._main is not None else self._bar
        return rows

    def _confirm(self, total: int) -> list[Row]:
        """The bar with this total is the training's: return the rows that it drew before."""
        if self._main is not None:
            return []
        self._main = total
        early = [row for row in self._early if row["total_steps"] == total]
        self._early.clear()
        self._newest = early[-1]["step"] if early else self._newest
        return early

    def _step_row(self, step: int, total: int | None, values: Row) -> list[Row]:
        if not step or (step == self._newest and not values):
            return []
        self._newest = step
        return [{**values, "step": step, **({} if total is None else {"total_steps": total})}]

    def _epoch_row(
        self, epoch: re.Match[str], count: int, total: int, values: Row, *, from_zero: bool = False
    ) -> list[Row]:
        """A bar of one epoch: Lightning counts from 0 (its rich bars have a "•"), "Epoch 1/3:" of others from 1."""
        number = int(epoch[1])
        base = 0 if from_zero else self._base.setdefault("epoch", 1 if number >= 1 and epoch[2] else 0)
        step = (number - base) * total + count
        epochs = None if epoch[2] is None else int(epoch[2]) + from_zero
        values = {**values, "epoch": number - base + count / total} if total else values
        if not count:
            return []
        if step == self._newest and "loss" not in values:
            return []
        return self._step_row(step, self._total if epochs is None else epochs * total, values)

    # Lines

    def _read_text(self, line: str) -> list[Row]:
        if not line:
            return []
        for parse in self._PARSERS:
            rows = parse(self, line)
            if rows is not None:
                return rows
        return []

    def _dictionaries(self, line: str) -> list[Row] | None:
        if "{" not in line:
            return None
        rows: list[Row] = []
        is_any = False
        for part in re.findall(r"\{[^{}]*\}?", line):
            pairs = _PAIR.findall(part)
            if any(key == "train_runtime" for key, _ in pairs):  # the summary after the last step
                continue
            row = named(pairs)
            for key, text in pairs:
                place = re.fullmatch(r"\s*(\d+)/(\d+)\s*", text)
                if place and key == "global_step/max_steps":
                    row["step"], row["total_steps"] = int(place[1]), int(place[2])
            is_evaluation = any(name.startswith("eval_") for name in row)
            has_place = any(name in row for name in ("epoch", "step", "learning_rate", "grad_norm"))
            is_row = ("loss" in row or is_evaluation or ("step" in row and "total_steps" in row)) and has_place
            if not is_row:
                continue
            is_any = True
            if is_evaluation:
                row.pop("samples_per_s", None)
            rows += self.flush()
            if "step" in row:
                row["step"] = int(row["step"])
                rows.append(self._with_total(row))
                self._newest = row["step"]
            else:
                self._pending = row
        return rows if is_any else None

    def _iteration(self, line: str) -> list[Row] | None:
        found = _ITERATION.search(line) if "teration" in line else None
        if found is None or _EVALUATION.search(line):
            return None
        fields = map(_FIELD.fullmatch, line.split("|"))
        pairs = [(field[1], field[2]) for field in fields if field] or _VALUE.findall(found[3])
        row = {"step": int(found[1]), "total_steps": int(found[2]), **named(pairs)}
        known = {key.lower(): number(text) for key, text in pairs}
        duration_ms, batch = known.get("elapsed time per iteration (ms)"), known.get("global batch size")
        if duration_ms:
            row["step_s"] = duration_ms / 1000
            if batch and "samples_per_s" not in row:
                row["samples_per_s"] = batch * 1000 / duration_ms
        return [row]

    def _deepspeed(self, line: str) -> list[Row] | None:
        if "SamplesPerSec" not in line and "skipped=" not in line:
            return None
        found = _DEEPSPEED.search(line)
        if found:
            row = {"step": int(found[1]), "learning_rate": number(found[2])}
            self._newest = int(found[1])
            return [*self.flush(), row]
        timer = _TIMER.search(line)
        if timer is None:
            return None
        speed = number(timer[3] or timer[2])
        if timer[1]:
            return [{"step": int(timer[1]), "samples_per_s": speed}]
        return [{"step": self._newest, "samples_per_s": speed}] if self._newest else []

    def _evaluation(self, line: str) -> list[Row] | None:
        found = _EVALUATION.search(line) if "val" in line else None
        return found and [{"step": int(found["a"] or found["c"]), "eval_loss": number(found["b"] or found["d"])}]

    def _epoch_heading(self, line: str) -> list[Row] | None:
        found = _HEADING.fullmatch(line) if "Epoch " in line else None
        if found is not None:
            self._heading.begin(int(found[1]), int(found[2]))
        elif line[:5] == "Epoch" and "loss" in line and not re.search(r"\d|:", line):
            self._columns = line.split()
        else:
            return None
        return []

    def _count(self, line: str) -> list[Row] | None:
        found = None if self._heading.number is None else _COUNT.match(line)
        values = {} if found is None else named(_VALUE.findall(found["values"]))
        if found is None or "loss" not in values:
            return None
        return self._below_heading(int(found["n"]), int(found["total"]), values, is_bar=True)

    def _below_heading(self, count: int, total: int, values: Row, *, is_bar: bool) -> list[Row]:
        place = self._heading.place(count, total, is_bar=is_bar)
        return [] if place is None else [{**values, **place}]

    def _rich(self, line: str) -> list[Row] | None:
        found = _RICH.match(line) if "━" in line or "─" in line else None
        if found is None:
            return None
        cells = found["name"].rstrip(": ").split()
        if self._columns and len(cells) == len(self._columns):
            return self._table_bar(list(zip(self._columns, cells)), int(found["n"]), int(found["total"]))
        values = named([(key, text) for key, text in re.findall(rf"([\w/]+):\s*({NUM})", found["values"], re.I)])
        epoch = _EPOCH_BAR.fullmatch(found["name"])
        count, total = int(found["n"]), int(found["total"])
        if epoch is not None:
            return self._epoch_row(epoch, count, total, values, from_zero="•" in found["values"])
        is_training = _TRAINING_BAR.fullmatch(found["name"]) or "loss" in values
        return self._step_row(count, total, values) if is_training and not _NOT_TRAINING.search(found["name"]) else []

    def _table_bar(self, values: list[tuple[str, str]], count: int, total: int) -> list[Row]:
        """A bar after the values of the names above it, of which the first is its epoch."""
        epoch, own = _EPOCH_BAR.fullmatch(f"epoch {values[0][1]}"), named(values[1:])
        loss = {name: value for name, value in own.items() if name == "loss"}
        is_ahead = self._is_before_count(count, values, own)
        if count == total:
            own.update(loss)
        elif is_ahead:
            count += 1
        else:
            own.pop("loss", None)  # of this step or the next one
        return [] if epoch is None else self._epoch_row(epoch, count, total, own)

    def _batch(self, line: str) -> list[Row] | None:
        found = _BATCH.search(line) if "poch" in line or "POCH" in line or "rain" in line else None
        if found is not None and not is_prefix(line[: found.start()]):
            return None
        values = {} if found is None else named(_VALUE.findall(found["values"]))
        if found is None or "loss" not in values:
            return None
        count, total, number = int(found["n"]), int(found["total"]), int(found["epoch"])
        base = self._base.setdefault("batch", min(number, 1))  # an output that counts from 0 has an epoch 0
        if found["share"] is not None:
            percent = int(re.sub(r"\D", "", found["share"]))
            if found["word"].lower() == "epoch" or abs(percent * (total - 1) - 100 * count) > total:
                return [{**values, "epoch": number - 1 + count / total}] if total and number else []  # samples
            count += 1  # batches from 0: the percentage is that of the last number
        row = {"step": (number - base) * total + count, **values, "epoch": number - base + count / (total or 1)}
        return [row if found["epochs"] is None else {**row, "total_steps": int(found["epochs"]) * total}]

    def _step(self, line: str) -> list[Row] | None:
        lower = line.lower()
        found = _STEP.search(line) if any(word in lower for word in ("step", "iter", "(epoch ")) else None
        if found is None or not is_prefix(line[: found.start()]):
            return None
        values = named(_VALUE.findall(found["values"]))
        if "loss" not in values or not is_record(found["values"]):
            return None
        epoch = _EPOCH_BEFORE.search(line)
        step, total = int(found["n"]), int(found["total"]) if found["total"] else None
        if epoch is None and self._heading.number is not None:
            if total is not None:
                is_bar = re.match(r"\s*\[[=>.]+\]", found["values"]) is not None
                return self._below_heading(step, total, values, is_bar=is_bar)
            return [{**values, "step": self._counter.over_all(step, float(self._heading.number), None)}]
        row: Row = {**({"epoch": float(epoch[1])} if epoch else {}), **values, "step": step}
        if epoch is not None:
            row["step"] = self._counter.over_all(step, float(epoch[1]), total)
        if row["step"] != step:  # the total is that of an epoch
            return [row]
        return [self._with_total(row if total is None else {**row, "total_steps": total})]

    def _table(self, line: str) -> list[Row] | None:
        """A row of Stable-Baselines3: the number of steps is above the loss."""
        found = _TABLE.match(line) if line[:1] == "|" else None
        value = None if found is None else number(found[2])
        if found is None or value is None:
            return None
        if found[1] == "total_timesteps":
            self._newest = int(value)
            return [{"step": self._newest}]
        return [{"step": self._newest, "loss": value}] if self._newest else []

    def _with_total(self, row: Row) -> Row:
        if "total_steps" in row:
            row["total_steps"] = int(row["total_steps"])
        return row if self._total is None or "total_steps" in row else {"total_steps": self._total, **row}

    _PARSERS: tuple[Callable[[ProgressReader, str], list[Row] | None], ...] = (
        _dictionaries,
        _evaluation,
        _iteration,
        _deepspeed,
        _epoch_heading,
        _count,
        _rich,
        _table,
        _batch,
        _step,
    )
