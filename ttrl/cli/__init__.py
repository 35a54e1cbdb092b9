"""The `ttrl` command: a file for each group of subcommands, listed in `commands`."""

from ttrl.cli.commands import main, make_parser

__all__ = ["main", "make_parser"]
