"""`slimtensors completion`: a script that lets a shell complete verbs, options and their values."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from slimtensors.archive import dialects
from slimtensors.cli import console
from slimtensors.codecs import presets
from slimtensors.quantization.scheme import PRESETS as SCHEMES

_VALUES: Mapping[str, Iterable[str]] = {
    "--preset": presets.PRESETS,
    "--dialect": dialects.names(),
    "--quantize": SCHEMES,
}
"""Of options that take more than these, and so have no choices."""


@dataclass(frozen=True)
class Argument:
    """What can follow a verb."""

    names: tuple[str, ...]
    """Of an option; none for what stands alone."""
    about: str
    values: tuple[str, ...]
    takes_value: bool


@dataclass(frozen=True)
class Verb:
    """One verb and what can follow it."""

    name: str
    about: str
    arguments: tuple[Argument, ...]

    @property
    def options(self) -> Iterator[Argument]:
        """Those that have names."""
        return (argument for argument in self.arguments if argument.names)

    @property
    def values(self) -> tuple[str, ...]:
        """What can stand without an option's name; where there is none, a file."""
        return tuple(
            x for argument in self.arguments if not argument.names for x in argument.values
        )


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "completion",
        "print a script that completes this command in your shell",
        "slimtensors completion bash > ~/.local/share/bash-completion/completions/slimtensors",
        "slimtensors completion zsh > ~/.zfunc/_slimtensors   # a folder of your $fpath",
        "slimtensors completion fish > ~/.config/fish/completions/slimtensors.fish",
    )
    verb.add_argument("shell", choices=tuple(_SHELLS), help="the shell that will read it")
    verb.set_defaults(run=lambda options: run(options, verbs))


def run(options: argparse.Namespace, verbs: "console.Verbs") -> int:
    """Print the script."""
    print(_SHELLS[options.shell](described(verbs)))
    return 0


def described(verbs: "console.Verbs") -> list[Verb]:
    """Return what the parsers of all verbs take."""
    about = {action.dest: action.help or "" for action in verbs._choices_actions}
    return [
        Verb(name, about[name], tuple(_argument(action) for action in parser._actions))
        for name, parser in verbs.choices.items()
    ]


def _argument(action: argparse.Action) -> Argument:
    names = tuple(action.option_strings)
    known = next((_VALUES[name] for name in names if name in _VALUES), ())
    values = tuple(map(str, action.choices if action.choices is not None else known))
    return Argument(names, action.help or "", values, takes_value=action.nargs != 0)


def _bash(verbs: list[Verb]) -> str:
    after, options, alone = [], [], []
    for verb in verbs:
        for option in verb.options:
            if option.values:
                cases = "|".join(f'"{verb.name} {name}"' for name in option.names)
                after.append(f'        {cases}) offered="{" ".join(option.values)}" ;;')
        names = " ".join(name for option in verb.options for name in option.names)
        options.append(f'        {verb.name}\\ -*) offered="{names}" ;;')
        if verb.values:
            alone.append(f'        {verb.name}\\ *) offered="{" ".join(verb.values)}" ;;')
    every = " ".join(verb.name for verb in verbs)
    return "\n".join(
        [
            "_slimtensors() {",
            '    local word="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" offered=""',
            '    case "$verb ${COMP_WORDS[COMP_CWORD-1]}" in',
            *after,
            '    *) case "$verb $word" in',
            *options,
            *alone,
            "        esac ;;",
            "    esac",
            f'    [ "$COMP_CWORD" -eq 1 ] && offered="{every} --help --version"',
            '    COMPREPLY=($(compgen -W "$offered" -- "$word"))',
            "}",
            "complete -o default -F _slimtensors slimtensors",
        ]
    )


def _zsh(verbs: list[Verb]) -> str:
    lines = ["#compdef slimtensors", "_slimtensors() {", "    local -a verbs=("]
    lines += [f"        {_quoted(f'{verb.name}:{verb.about}')}" for verb in verbs]
    lines += ["    )", "    if (( CURRENT == 2 )); then", "        _describe verb verbs"]
    lines += ["        return", "    fi", "    shift words", "    (( CURRENT-- ))"]
    lines += ["    case $words[1] in"]
    for verb in verbs:
        lines += [f"    {verb.name}) _arguments \\"]
        for option in verb.options:
            value = f":value:{_zsh_values(option.values)}" if option.takes_value else ""
            about = option.about.translate({ord(c): f"\\{c}" for c in "[]:"})
            lines += [f"        {_quoted(f'{name}[{about}]{value}')} \\" for name in option.names]
        lines += [f"        {_quoted(f'*:value:{_zsh_values(verb.values)}')} ;;"]
    lines += ["    esac", "}"]
    # Read from $fpath this text is the body of the function, evaluated it has to be registered.
    lines += ['if [ "$funcstack[1]" = _slimtensors ]; then _slimtensors "$@"']
    return "\n".join([*lines, "else compdef _slimtensors slimtensors; fi"])


def _zsh_values(values: tuple[str, ...]) -> str:
    return f"({' '.join(values)})" if values else "_files"


def _fish(verbs: list[Verb]) -> str:
    start = "complete -c slimtensors"
    lines = []
    for verb in verbs:
        lines.append(
            f"{start} -n __fish_use_subcommand -f -a {verb.name} -d {_fish_quoted(verb.about)}"
        )
        after = f"{start} -n '__fish_seen_subcommand_from {verb.name}'"
        for option in verb.options:
            names = (f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            value = f" -x -a {_fish_quoted(' '.join(option.values))}" if option.values else ""
            value = value or (" -r" if option.takes_value else "")
            lines.append(f"{after} {' '.join(names)}{value} -d {_fish_quoted(option.about)}")
        if verb.values:
            lines.append(f"{after} -f -a {_fish_quoted(' '.join(verb.values))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SHELLS: Mapping[str, Callable[[list[Verb]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
