"""Keys of the job file for readers: `ascendrun schema KEY`, and the page docs/job-file.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import NotFoundError
from ascendrun.core.jobfile.model import SECTIONS, JobSpec, PipelineStage, Role, job_json_schema
from ascendrun.core.reader.model_reader import flow
from ascendrun.options import Option, ProgramOptions
from ascendrun.text import Text, language, template_of


@dataclass(frozen=True)
class Key:
    """One key. `type`, `default` and `example` as YAML; default None: required or not set."""

    path: str
    type: Text
    is_required: bool
    default: str | None
    meaning: Text
    example: str | None


def list_keys() -> tuple[Key, ...]:
    """Every key in the order of the schema, sections before their keys, those of a stage last."""
    schema = job_json_schema()
    keys = list(_keys_of(schema, "", schema, JobSpec.model_fields))
    stage = schema["$defs"]["PipelineStage"]
    only_stage = {name: row for name, row in stage["properties"].items() if name in ("name", "needs")}
    keys += _keys_of({**stage, "properties": only_stage}, "stages[].", schema, PipelineStage.model_fields)
    keys += _keys_of(schema["$defs"]["Role"], "roles[].", schema, Role.model_fields)
    return tuple(sorted(keys, key=lambda key: key.path != "name"))


def describe_key(key: Key) -> Iterator[str]:
    """The lines that `ascendrun schema KEY` prints."""
    default = Text("schema.required", "required") if key.is_required else key.default or Text("schema.unset", "not set")
    yield from _describe(key.path, key.type, default, key.meaning)
    if key.example is not None:
        yield from (row.rstrip() for row in describe_rows([(Text("schema.example", "example"), "")]))
        yield from (f"  {line}" for line in key.example.splitlines())


def describe_option(table: ProgramOptions, option: Option) -> Iterator[str]:
    """The lines that `ascendrun schema PROGRAM.OPTION` prints."""
    kind = template_of(f"option-type.{option.type}", option.type, language())
    default = "null" if option.default is None else flow(option.default) or '""'
    yield from _describe(f"args.{option.name} ({table.program})", kind, default, table.help(option))
    if option.choices:
        yield from describe_rows([(Text("schema.choices", "choices"), _items(option.choices))])
    if option.aliases:
        yield from describe_rows([(Text("schema.aliases", "aliases"), _items(option.aliases))])


def _describe(key: str, kind: object, default: object, meaning: object) -> Iterator[str]:
    return describe_rows(
        [
            (Text("schema.key", "key"), key),
            (Text("schema.type", "type"), str(kind)),
            (Text("schema.default", "default"), str(default)),
            (Text("schema.meaning", "meaning"), str(meaning)),
        ]
    )


def _items(values: Iterable[object]) -> str:
    return str(Text("schema.items", "{items}", items=[str(value) for value in values]))


def describe_rows(rows: Iterable[tuple[Text | str, str]]) -> Iterator[str]:
    """`title: value` for each row."""
    for title, value in rows:
        yield str(Text("schema.row", "{title}: {value}", title=title, value=value))


def explained_names(programs: Mapping[str, ProgramOptions]) -> Iterator[str]:
    """Yield what `explain_key` knows: keys of job files, programs, and PROGRAM.OPTION."""
    yield from (key.path for key in list_keys())
    for program, table in programs.items():
        yield from (program, *(f"{program}.{option}" for option in table.options))


def explain_key(key: str, programs: Mapping[str, ProgramOptions]) -> list[str]:
    """The lines about a key of job files, a program, or PROGRAM.OPTION. Raises NotFoundError."""
    from ascendrun.text import closest, did_you_mean

    keys = {each.path: each for each in list_keys()}
    program, _, option_name = key.partition(".")
    table = programs.get(program)
    if table is not None and not option_name:
        return list(describe_rows((option.name, str(table.help(option))) for option in table.options.values()))
    if table is not None:
        option = table.find(option_name)
        if option is not None:
            return list(describe_option(table, option))
        near = closest(option_name, table.options)
        raise NotFoundError(
            Text("options.unknown", "unknown option {option} of {program}", option=option_name, program=program),
            hint=did_you_mean(f"{program}.{near}") if near else None,
        )
    found = keys.get(key) or keys.get(f"stages[].{key.removeprefix('stages.')}")
    if found is not None:
        below = [each for each in keys.values() if each.path.startswith(f"{found.path}.")]
        return [*describe_key(found), *describe_rows((each.path, str(each.meaning)) for each in below)]
    near = closest(key, [*keys, *programs])
    raise NotFoundError(
        Text("schema.unknown", "unknown key {key:quote}", key=key), hint=did_you_mean(near) if near else None
    )


def _keys_of(
    part: Mapping[str, Any], prefix: str, schema: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[Key]:
    for name, row in part["properties"].items():
        section = SECTIONS.get(name) if not prefix else None
        is_required = name in part.get("required", ())
        field = fields[name]
        value = None if is_required else field.get_default(call_default_factory=True)
        yield Key(
            path=f"{prefix}{name}",
            type=TYPES["object"] if section is not None else _type_of(row, schema),
            is_required=is_required,
            default=None if section is not None or value is None or value in ((), {}) else _plain(value),
            meaning=Text(f"key.{prefix}{name}", _escape(" ".join(row["description"].split()))),
            example=_example(prefix, name, field.examples[0]) if field.examples else None,
        )
        if section is not None:
            yield from _keys_of(schema["$defs"][section.__name__], f"{name}.", schema, section.model_fields)


def _example(prefix: str, name: str, value: Any) -> str:
    if prefix == "roles[].":
        return f"roles: {flow([{'name': 'serve', 'command': ['./serve'], name: value}])}"
    if prefix == "stages[].":
        return f"stages: [{{{'' if name == 'name' else 'name: train, '}{name}: {flow(value)}}}]"
    if prefix == "workdir." and name != "path":
        return f"workdir: {{path: ., {name}: {flow(value)}}}"
    return f"{name}: {flow(value)}" if not prefix else f"{prefix[:-1]}: {{{name}: {flow(value)}}}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else flow(value)


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


TYPES = {
    "string": Text("key-type.string", "string"),
    "integer": Text("key-type.integer", "integer"),
    "number": Text("key-type.number", "number"),
    "boolean": Text("key-type.boolean", "boolean"),
    "object": Text("key-type.mapping", "mapping"),
}


def _type_of(row: Mapping[str, Any], schema: Mapping[str, Any]) -> Text:
    """Return the type of a row of the JSON Schema, such as `integer, 1 to 4096`."""
    if "$ref" in row:
        return TYPES["object"]
    if "anyOf" in row:
        return next(_type_of(each, schema) for each in row["anyOf"] if each.get("type") != "null")
    if "enum" in row:
        return Text("key-type.choice", "one of {choices}", choices=[str(each) for each in row["enum"]])
    kind = row.get("type")
    if kind == "array":
        return Text("key-type.list", "list ({item})", item=_type_of(row["items"], schema))
    name = TYPES["string" if isinstance(kind, list) else str(kind)]
    low, high = row.get("minimum", row.get("exclusiveMinimum")), row.get("maximum")
    if low is None or high is None:
        return name
    return Text("key-type.limits", "{type}, {low:g} to {high:g}", type=name, low=low, high=high)
