import sqlite3
import stat
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.measurement import metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, Newest, RankSample, RawText
from ascendrun.head.state.sample_store import LEVELS, RAW_TEXTS, SampleStore
from ascendrun.head.state.state_dir import StoreUnusableError

T = 1_700_000_000.0 // 600 * 600
HOUR, DAY = 3600.0, 86400.0


def device(at_s: float, host: str = "a1", number: int = 0, **figures: Any) -> DeviceSample:
    return DeviceSample(at_s, host, number, "npu", **figures)


def tend_all(store: SampleStore, now_s: float) -> None:
    while store.tend(now_s=now_s):
        pass


@pytest.fixture
def store(tmp_path: Path) -> Any:
    opened = SampleStore.open(tmp_path)
    yield opened
    opened.close()


LOCK_WHOLE = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)  # where SQLite locks, of a file that is in use
"""


def test_opening_a_file_once_more_leaves_the_locks_that_say_it_is_in_use(store: SampleStore, tmp_path: Path) -> None:
    store.add([device(T)])
    SampleStore.open(tmp_path).close()
    asked = subprocess.run([sys.executable, "-c", LOCK_WHOLE, str(store.path)], capture_output=True, text=True)
    assert asked.returncode == 1 and "BlockingIOError" in asked.stderr


def test_nothing_is_there_before_anything_was_measured(tmp_path: Path) -> None:
    reader = SampleStore.open_for_reading(tmp_path)
    assert reader.newest(since_s=0) == Newest() and reader.details(since_s=0) == ()
    assert not (tmp_path / "samples.db").exists()


def test_the_tables_have_every_figure_of_the_words(store: SampleStore, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "samples.db") as db:
        for name, kind in (("device", DeviceSample), ("host", HostSample), ("rank", RankSample)):
            for table in (f"{name}_raw", f"{name}_minute", f"{name}_minute_peak", f"{name}_ten", f"{name}_ten_peak"):
                columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
                assert columns == ["thing", "at_s", *metrics_of(kind)]
    db.close()


def test_a_sample_comes_back_as_it_went_in_with_the_unknown_unknown(store: SampleStore, tmp_path: Path) -> None:
    samples = (
        DeviceSample(
            T,
            "a1",
            3,
            "npu",
            name="910B3",
            utilisation=97.5,
            memory_used_bytes=1 << 35,
            health="OK",
            link_up=False,
            link_downs=2,
            pids=(4711, 12),
            source="npu-smi",
        ),
        DeviceSample(T, "a1", 4, "npu", pids=(), link_up=True),
        DeviceSample(T, "a1", 5, "npu"),
        HostSample(T, "a1", cpu=12.5, disk_free_bytes=0),
        RankSample(T, "a1", "j-0001", 2, 7, pid=99, device=3, cpu=101.0, state="R"),
    )
    store.add(samples)
    reader = SampleStore.open_for_reading(tmp_path)
    assert reader is not None
    newest = reader.newest(since_s=T - 1)
    reader.close()
    assert newest.devices + newest.hosts + newest.ranks == samples


def test_the_newest_is_one_of_each_thing_and_not_older_than_asked(store: SampleStore) -> None:
    store.add(
        [
            device(T, number=1, utilisation=1.0),
            device(T + 5, number=1, utilisation=2.0),
            device(T + 4, host="b2"),
            device(T - 60, number=9),
            HostSample(T + 3, "b2"),
        ]
    )
    assert store.newest(since_s=T).devices == (device(T + 5, number=1, utilisation=2.0), device(T + 4, host="b2"))
    assert store.newest(since_s=T, hosts=["b2"]).devices == (device(T + 4, host="b2"),)
    assert store.newest(since_s=T, hosts=[]).hosts == ()
    assert store.newest(since_s=T + 6).devices == ()


def test_a_series_is_in_time_order_and_of_what_was_asked_for(store: SampleStore) -> None:
    store.add(
        [
            RankSample(T + k, "a1", job, 1, rank, cpu=float(k))
            for k in (3, 1, 2)
            for job in ("j-1", "j-2")
            for rank in (0, 1)
        ]
    )
    one = store.rank_series(since_s=T, until_s=T + 3, job="j-2", rank=1)
    assert [(sample.at_s - T, sample.job, sample.rank) for sample in one] == [(1, "j-2", 1), (2, "j-2", 1)]
    everything = store.rank_series(since_s=T, until_s=T + 10)
    assert len(everything) == 12 and [s.at_s for s in everything] == sorted(s.at_s for s in everything)


def test_a_minute_is_kept_as_its_mean_and_its_peak_and_none_never_counts_as_zero(store: SampleStore) -> None:
    store.add(
        [
            device(
                T + 5 * k,
                utilisation=None if k % 2 else 50.0,
                power_w=None,
                memory_used_bytes=k,
                link_downs=k,
                health="OK" if k < 11 else "Alarm",
                temperature_c=40.0 + k,
            )
            for k in range(12)
        ]
    )
    tend_all(store, T + 10 * 60)
    tend_all(store, T + 3 * HOUR)
    assert store.device_series(since_s=T, until_s=T + 60) == (
        device(T, utilisation=50.0, memory_used_bytes=6, link_downs=11, health="Alarm", temperature_c=45.5),
    )
    assert store.device_series(since_s=T, until_s=T + 60, peaks=True) == (
        device(T, utilisation=50.0, memory_used_bytes=11, temperature_c=51.0),
    )


def test_a_minute_that_is_not_over_is_not_summed_up_yet(store: SampleStore) -> None:
    store.add([device(T, utilisation=1.0)])
    tend_all(store, T + 30)
    assert store.device_series(since_s=T, until_s=T + 60, every_s=60.0) == (device(T, utilisation=1.0),)
    store.add([device(T + 59, utilisation=3.0)])
    tend_all(store, T + 90)
    assert store.device_series(since_s=T, until_s=T + 60, every_s=60.0) == (device(T, utilisation=2.0),)


def test_what_comes_late_changes_the_minute_it_belongs_to(store: SampleStore) -> None:
    store.add([device(T, utilisation=0.0)])
    tend_all(store, T + 100)
    store.add([device(T + 1, utilisation=100.0)])
    tend_all(store, T + 100)
    assert store.device_series(since_s=T, until_s=T + 60, every_s=60.0)[0].utilisation == 50.0


@pytest.mark.parametrize("age_s, count", [(HOUR, 12), (3 * HOUR, 1), (6 * DAY, 1), (30 * DAY, 1), (91 * DAY, 0)])
def test_the_older_the_coarser_and_in_the_end_nothing(store: SampleStore, age_s: float, count: int) -> None:
    now_s = T + age_s
    store.add([device(T + 5 * k, utilisation=float(k)) for k in range(12)] + [HostSample(now_s - 1, "a1")])
    tend_all(store, min(now_s, T + 700))
    tend_all(store, now_s)
    assert len(store.device_series(since_s=0, until_s=now_s)) == count
    assert len(store.device_series(since_s=0, until_s=now_s, peaks=True)) == count


def test_a_series_over_all_levels_has_every_moment_once(store: SampleStore) -> None:
    now_s = T + 8 * DAY
    moments = [now_s - 300 * k for k in range(1, int(8 * DAY / 300))]
    store.add([HostSample(at_s, "a1", cpu=1.0) for at_s in moments])
    tend_all(store, now_s)
    series = store.host_series(since_s=0, until_s=now_s)
    steps = [round(after.at_s - before.at_s) for before, after in zip(series, series[1:])]
    assert set(steps) == {300, 600}, "from the raw to the minutes to the ten minutes without hole or overlap"
    assert steps == sorted(steps, reverse=True), "the coarse ones are the old ones"
    assert {sample.cpu for sample in series} == {1.0}


def test_a_coarse_look_reads_the_coarse_rows_and_the_newest_as_they_came(store: SampleStore) -> None:
    store.add([HostSample(T + k, "a1", cpu=float(k)) for k in range(0, 3600, 5)])
    tend_all(store, T + 3600)
    coarse = store.host_series(since_s=T, until_s=T + 3600, every_s=600.0)
    assert [sample.at_s for sample in coarse if sample.at_s < T + 3000] == [T + 600 * k for k in range(5)]
    assert coarse[-1] == HostSample(T + 3595, "a1", cpu=3595.0)


def test_what_was_pruned_leaves_no_row_and_no_thing(store: SampleStore, tmp_path: Path) -> None:
    store.add([RankSample(T, "a1", f"j-{k}", 1, 0, cpu=1.0) for k in range(500)])
    tend_all(store, T + HOUR)
    tend_all(store, T + 91 * DAY)
    db = sqlite3.connect(tmp_path / "samples.db")
    tables = [f"rank_{level.name}" for level in LEVELS] + ["rank_minute_peak", "rank_ten_peak", "things", "unsummed"]
    assert {table: db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables} == dict.fromkeys(
        tables, 0
    )
    db.close()
    store.add([RankSample(T + 91 * DAY, "a1", "j-1", 1, 0, cpu=2.0)])
    assert len(store.newest(since_s=T + 91 * DAY).ranks) == 1, "a thing that was forgotten may come again"


def test_texts_that_nobody_understood_are_kept_but_not_without_end(store: SampleStore) -> None:
    for k in range(RAW_TEXTS + 5):
        store.add([], raw=[RawText(T + k, "a1", "npu-smi", f"text {k}", "no table in it")])
    store.add([], raw=[RawText(T, "b2", "hccn", "x", "y")])
    kept = store.raw(hosts=["a1"])
    assert [text.text for text in kept] == [f"text {k}" for k in range(5, RAW_TEXTS + 5)]
    assert store.raw(tool="hccn") == (RawText(T, "b2", "hccn", "x", "y"),)


def test_how_far_was_read_stands_with_the_rows(store: SampleStore) -> None:
    store.add([device(T)], progress={("tag.1/a1", 0): 100})
    store.add([device(T + 5)], progress={("tag.1/a1", 0): 200, ("tag.1/a1", 1): 7, ("tag.1/b2", 0): 1})
    assert store.all_progress().get("tag.1/a1", {}) == {0: 200, 1: 7}
    assert store.all_progress().get("tag.2/a1", {}) == {}


WRITER = """
import sys, pathlib
from ascendrun.core.samples import DeviceSample
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.sample_store import LEVELS
store = SampleStore.open(pathlib.Path(sys.argv[1]))
for k in range(1_000_000):
    store.add([DeviceSample(1e9 + k, "a1", n, "npu") for n in range(5)], progress={("s", 0): k + 1})
    print(k, flush=True)
"""


def test_after_a_kill_in_the_middle_rows_and_progress_say_the_same(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for _ in range(20):
        assert writer.stdout.readline()
    writer.kill()
    writer.communicate()
    store = SampleStore.open(tmp_path)
    done = store.all_progress().get("s", {})[0]
    assert done >= 20
    assert len(store.device_series(since_s=0, until_s=T + 2_000_000)) == 5 * done
    store.close()


def test_a_refused_batch_leaves_nothing_and_the_next_one_is_whole(store: SampleStore) -> None:
    with pytest.raises(StoreUnusableError):
        no_number: Any = object()
        store.add([device(T, host="new", number=8), replace(device(T), utilisation=no_number)])
    assert store.newest(since_s=0).devices == ()
    store.add([device(T, host="new", number=8)])
    assert store.newest(since_s=0).devices == (device(T, host="new", number=8),)


def test_a_broken_file_is_refused_to_readers_and_replaced_by_the_controller(tmp_path: Path) -> None:
    (tmp_path / "samples.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnusableError) as caught:
        SampleStore.open_for_reading(tmp_path)
    assert caught.value.message.key == "store.damaged"
    with SampleStore.open(tmp_path) as store:
        store.add([device(T)])
        assert store.set_aside_at is not None and store.set_aside_at.read_bytes().startswith(b"no database")


def test_a_file_of_a_newer_version_is_left_alone(store: SampleStore, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "samples.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    for open_it in (SampleStore.open, SampleStore.open_for_reading):
        with pytest.raises(StoreUnusableError, match="newer ascendrun"):
            open_it(tmp_path)


def test_a_reader_of_a_new_file_changes_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "samples.db").touch(0o600)
    with SampleStore.open_for_reading(tmp_path) as reader:
        assert reader.newest(since_s=0).devices == ()
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("samples.db", 0)]


def test_nobody_else_may_read_it(store: SampleStore, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "samples.db").stat().st_mode) == 0o600


def test_every_kind_is_named_by_fields_it_has() -> None:
    for kind in SampleStore.KINDS.values():
        assert {field.name for field in fields(kind)} == {"at_s", *kind.KEY, *metrics_of(kind)}
