"""The tables of codes against the names that the vendor gives these codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendrun.ascend.vocabularies import deepest, read_table, value_of, value_of_title, values_in

try:
    import tomllib
except ModuleNotFoundError:  # Python below 3.11
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

NAMES = tomllib.loads((Path(__file__).parent / "vendor_names.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("table", sorted(NAMES))
def test_the_domain_of_a_code_agrees_with_the_vendors_name_or_the_row_gives_the_reason(table: str) -> None:
    excused = {key for row in read_table(table)["values"] if row.get("because") for key in row["keys"]}
    contradictions = []
    for code, name in NAMES[table].items():
        value, by_name = value_of(table, code), value_of_title(name, code)
        keys = {code, *(f"{code[:end]}*" for end in range(1, len(code)))}
        if value is None:
            contradictions.append(f"{code} {name}: no value")
        elif by_name is not None and by_name.domain != value.domain and not (value.proof == "outer" or keys & excused):
            contradictions.append(f"{code} {name}: {value.domain}, not {by_name.domain}")
    assert not contradictions, "\n".join(contradictions)


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("Resource_Error_Insufficient_Device_Memory(EL0099): Failed to allocate 2097152 bytes", "device-memory"),
        ("[PID: 9] Execution_Error_Stream_Synchronize_Timeout(EE1099): no end", "silent"),
        ("Communication_Error_Bind_IP_Port(EI0099): Failed to listen", "resource"),
        ("EI0099: something new", "network"),
        ("Something_Else(EI0099): something new", "network"),
        ("Resource_Busy(EL0005): The resources are busy.", "resource"),
        ("EE1013: Failed to allocate 1073741824 bytes of host memory via malloc to Runtime.", "host-memory"),
    ],
)
def test_a_code_that_no_table_has_is_known_by_its_name(text: str, domain: str) -> None:
    found = deepest(values_in(text))
    assert found is not None and found.domain == domain
