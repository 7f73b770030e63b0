"""The job file: YAML, schema, rules, launchers."""
