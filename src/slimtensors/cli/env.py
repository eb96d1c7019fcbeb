"""`slimtensors env`: versions, processor and extras, for bug reports."""

import argparse
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

import slimtensors
from slimtensors import _core
from slimtensors.cli import console
from slimtensors.tensor import Json

_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:;.*\bextra == ['\"]([\w-]+)['\"])?")


EXAMPLES = (
    "slimtensors env",
    "slimtensors env --json",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Print one line per item."""
    found = describe_environment()
    if options.json:
        console.print_json(found)
        return 0
    rows = [
        *((name, str(found[name])) for name in ("slimtensors", "python", "platform", "processor")),
        ("cores", f"{found['cores']}, torch uses {found['torch_threads']}"),
        ("core", f"{found['core']} code"),
        *((name, text or "missing") for name, text in found["packages"].items()),
        *((f"[{extra}]", _list_versions(packages)) for extra, packages in found["extras"].items()),
    ]
    width = max(len(name) for name, _ in rows) + 2
    print("\n".join(f"{name:{width}}{text}" for name, text in rows))
    return 0


def describe_environment() -> Json:
    """Return the output of `env --json`; a missing package is null."""
    required, extras = _requirements()
    return {
        "slimtensors": slimtensors.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "core": _core.cpu(),
        # torch's own version also names the build, such as +cu130.
        "packages": {name: _version(name) for name in required} | {"torch": torch.__version__},
        "extras": {
            extra: {name: _version(name) for name in names} for extra, names in extras.items()
        },
    }


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the required packages, and those of each extra."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in requires("slimtensors") or []:
        found = _REQUIREMENT.match(line)
        assert found, line
        name, extra = found.groups()
        (required if extra is None else extras.setdefault(extra, [])).append(name)
    return required, extras


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor name that the kernel reports, if any."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _list_versions(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {found or 'missing'}" for name, found in packages.items())
