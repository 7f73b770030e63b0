"""The table of the rules that find whom the others waited for."""

from __future__ import annotations

from ascendrun.ascend.vocabularies import read_table
from ascendrun.health.diagnosis import wait_rules


def test_each_rule_of_the_table_names_a_search_and_each_row_that_it_compares() -> None:
    table = read_table("waits")
    rules = [wait_rules.Rule(**row) for row in table["rules"]]
    assert len({rule.name for rule in rules}) == len(rules) > 0
    assert all(callable(getattr(wait_rules, rule.find, None)) for rule in rules)
    assert {row for rule in rules for row in rule.rows} == {*table["rows"]}
    assert all(wait_rules.Row(**row).code for row in table["rows"].values())
