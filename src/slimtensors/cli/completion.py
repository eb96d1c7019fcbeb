"""`slimtensors completion`: print a completion script for a shell."""

import argparse

from slimtensors.archive import dialects
from slimtensors.cli import parser
from slimtensors.codecs import presets
from slimtensors.errors import MissingDependencyError
from slimtensors.quantization.scheme import PRESETS as SCHEMES

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
EXAMPLES = (
    "slimtensors completion bash > ~/.local/share/bash-completion/completions/slimtensors",
    "slimtensors completion zsh > ~/.zfunc/_slimtensors   # a folder of your $fpath",
    "slimtensors completion fish > ~/.config/fish/completions/slimtensors.fish",
)

_VALUES = {"--preset": presets.PRESETS, "--dialect": dialects.names(), "--quantize": SCHEMES}
"""Values to offer for options that accept others too, and so have no argparse choices."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    verb.add_argument("shell", choices=SHELLS, help="the shell to complete in")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise MissingDependencyError("shtab", "completion") from error
    top = parser()
    for verb in _subparsers(top).values():
        for action in verb._actions:
            for name in action.option_strings:
                if name in _VALUES:
                    action.choices = tuple(_VALUES[name])
            if not action.option_strings and action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # read by shtab
    print(shtab.complete(top, shell=options.shell))
    return 0


def _subparsers(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (verbs,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    return verbs.choices
