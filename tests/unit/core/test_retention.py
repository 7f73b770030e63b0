"""The choice of old data: by age, then the oldest beyond the size; nothing younger goes before something older."""

from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.retention import Stored, choose_removals

ONE = st.builds(Stored, st.uuids().map(str), st.floats(0, 1000), st.integers(0, 100))
STORED = st.lists(ONE, max_size=12, unique_by=lambda one: one.name)


@given(STORED, st.floats(0, 1000), st.integers(0, 600))
def test_what_stays_is_within_both_limits_and_nothing_goes_without_need(stored, max_age_s, max_bytes):
    chosen = choose_removals(stored, now_s=1000.0, max_age_s=max_age_s, max_bytes=max_bytes)
    gone = {one.name: one.why for one in chosen}
    rest = [one for one in stored if one.name not in gone]
    assert all(1000.0 - one.since_s <= max_age_s for one in rest)
    assert sum(one.size_bytes for one in rest) <= max_bytes
    by_size = [one for one in stored if gone.get(one.name) == "size"]
    if by_size:
        last = max(by_size, key=lambda one: (one.since_s, one.name))
        assert sum(one.size_bytes for one in [*rest, last]) > max_bytes, "the last one had to go"
        assert all((one.since_s, one.name) > (last.since_s, last.name) for one in rest)
