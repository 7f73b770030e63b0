"""completion: print the completion script of a shell."""

from __future__ import annotations

import click

from ascendrun.cli.options import cli_command


@cli_command(
    "completion",
    examples="""
    source <(ascendrun completion bash)                                   # in ~/.bashrc
    ascendrun completion fish > ~/.config/fish/completions/ascendrun.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script of a shell: commands, options, jobs, hosts, templates."""
    from click.shell_completion import get_completion_class

    from ascendrun.cli import COMPLETE_VARIABLE, PROGRAM
    from ascendrun.cli.app import cli

    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(cli, {}, PROGRAM, COMPLETE_VARIABLE).source())
    return 0
