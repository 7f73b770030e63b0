"""Language of the process, chosen before any output, and click's own messages in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ascendrun import text

SETTING = re.compile(rb"^lang:[ \t]*[\"']?(\w+)", re.M)
SETTINGS_LIMIT_BYTES = 64 * 1024
CLICK_MODULES = ("core", "decorators", "exceptions", "formatting", "parser", "termui", "types")
CLICK_MESSAGES: Mapping[str, tuple[str, str]] = {
    "Usage:": ("click.usage", "Usage:"),
    "Options": ("click.options", "Options"),
    "Commands": ("click.commands", "Commands"),
    "Show this message and exit.": ("click.help", "Show this message and exit."),
    "Show the version and exit.": ("click.version", "Show the version and exit."),
    "default: {default}": ("click.default", "default: {default}"),
    "required": ("click.required", "required"),
    "Aborted!": ("click.aborted", "Aborted."),
    "Error: {message}": ("click.error", "error: {message}"),
    "Error: invalid input": ("click.invalid-input", "error: invalid input"),
    "{value!r} is not {choice}.": ("click.choice", "expected {choice}, got {value!r}"),
    "{value!r} is not one of {choices}.": ("click.choices", "expected one of {choices}, got {value!r}"),
    "{value!r} is not a valid {number_type}.": ("click.number", "expected a number, got {value!r}"),
    "{value} is not in the range {range}.": ("click.range", "expected a number in the range {range}, got {value}"),
    "{name} {filename!r} does not exist.": ("click.missing-file", "{name} {filename!r} not found"),
    "{name} {filename!r} is a directory.": ("click.is-directory", "{name} {filename!r} is a directory"),
    "{name} {filename!r} is a file.": ("click.is-file", "{name} {filename!r} is a file"),
    "{name} {filename!r} is not readable.": ("click.unreadable", "{name} {filename!r} is not readable"),
    "{name} {filename!r} is not writable.": ("click.unwritable", "{name} {filename!r} is not writable"),
    "file": ("click.file", "file"),
    "directory": ("click.directory", "directory"),
    "path": ("click.path", "path"),
    "Option {name!r} requires an argument.": ("click.option-needs-value", "option {name} requires a value"),
    "Option {name!r} does not take a value.": ("click.option-without-value", "option {name} does not accept a value"),
    "Got unexpected extra argument ({args})": ("click.extra-argument", "unexpected argument: {args}"),
    "Got unexpected extra arguments ({args})": ("click.extra-arguments", "unexpected arguments: {args}"),
}
"""Message of click -> key and English text. A message that is not listed is unchanged."""


def lang_flag(arguments: Sequence[str]) -> str | None:
    """Return the last valid `--lang` before `--`; read first, so that every error is in that language."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument.startswith("--lang="):
            found = argument[7:]
        elif argument == "--lang" and index + 1 < len(arguments):
            found = arguments[index + 1]
    return found if found in text.LANGUAGES else None


def choose_language(environ: Mapping[str, str]) -> str:
    """Return $ASCENDRUN_LANG > `lang:` in the settings file > $LC_ALL, $LC_MESSAGES, $LANG; else English.

    A quick search of the settings file is enough here: `load_settings` reports an invalid value.
    """
    chosen = environ.get("ASCENDRUN_LANG") or _setting(environ)
    return text.language_of({**environ, "ASCENDRUN_LANG": chosen})


def _setting(environ: Mapping[str, str]) -> str:
    found = ""
    for name in settings_files(environ):
        try:
            with open(name, "rb") as file:
                match = SETTING.search(file.read(SETTINGS_LIMIT_BYTES))
        except OSError:
            continue
        found = match.group(1).decode() if match else found
    return found


def settings_files(environ: Mapping[str, str]) -> tuple[str, str]:
    """As `core.settings.settings_files`, without its imports."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return "/etc/ascendrun/config.yaml", os.path.join(base, "ascendrun", "config.yaml")


def translate_click() -> None:
    """Make click print its own messages in ascendrun's form and in the language of the process."""
    import importlib

    for module in (importlib.import_module(f"click.{name}") for name in CLICK_MODULES):
        for name, function in (("_", _gettext), ("ngettext", _ngettext)):
            if hasattr(module, name):
                setattr(module, name, function)


def _gettext(message: str) -> str:
    key, english = CLICK_MESSAGES.get(message, ("", message))
    return text.template_of(key, english, text.language()) if key else message


def _ngettext(singular: str, plural: str, count: int) -> str:
    return _gettext(singular if count == 1 else plural)
