"""The shape of the source: layers, public names, what an import brings along."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import slimtensors

ROOT = Path(slimtensors.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
MODULES = [path for path in SOURCES if path.name != "__main__.py"]

LAYERS = [
    *["errors", "spec", "_core", "memory", "distance", "ranks", "lock", "tables"],
    "codecs",
    *["plan", "tree", "container", "sparsity", "entropy", "peers", "quantization", "pruning"],
    *["presets", "tensors"],
    *["summary", "dialects"],
    *["archive", "residual"],
    *["beside", "making", "delta", "formats", "folder", "delta_folder", "model", "compressor"],
    *["calibration", "quantized_folder"],
    *["recipe", "checkpoint", "distributed", "torchao", "integrations", "transformers"],
    *["report", "demo", "cli"],
]
"""From the lowest to the highest; a module imports only what stands before it here."""

LIGHT = "import torch, safetensors, safetensors.torch, numpy, importlib.metadata"


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, *, on_demand=True):
    """The modules that a file imports, anywhere in it or not in a module's `__getattr__`."""
    tree = ast.parse(path.read_text())
    if not on_demand:
        tree.body = [node for node in tree.body if getattr(node, "name", "") != "__getattr__"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(module):
    """The place of a module in the layers; none for the package itself."""
    _, _, rest = module.partition(".")
    return LAYERS.index(rest.partition(".")[0]) if rest else None


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_layers_below(path):
    here = layer(name_of(path))
    if here is None:
        return  # the package gathers names from everywhere
    # A package may offer names from above to those who ask it for them: that imports nothing.
    for module in imports(path, on_demand=path.name != "__init__.py"):
        if module.partition(".")[0] != "slimtensors":
            continue
        if module == "slimtensors" or module.partition(".")[2] not in known_names():
            module = module.rpartition(".")[0] or module
        there = layer(module)
        if there is None:
            assert LAYERS[here] == "cli", f"{path}: only the command line imports the package"
        else:
            assert there <= here, f"{path} imports {module} from above"


def known_names():
    """Dotted names of all modules below the package, without the package's own name."""
    names = {name_of(path).partition(".")[2] for path in MODULES} - {""}
    return names | {"_core"}


def test_every_module_has_a_layer():
    tops = {name_of(path).split(".")[1] for path in MODULES if path.parent != ROOT}
    tops |= {path.stem for path in MODULES if path.parent == ROOT} - {"__init__"}
    assert tops | {"_core"} == set(LAYERS)


PUBLIC = [
    "slimtensors",
    *(f"slimtensors.{name}" for name in ("checkpoint", "codecs", "quantization", "tensors")),
    *(
        f"slimtensors.{name}"
        for name in ("quantization.algorithms", "quantized_folder", "sparsity", "pruning")
    ),
    *(f"slimtensors.{name}" for name in ("transformers", "transformers.compression")),
    *(f"slimtensors.{name}" for name in ("calibration", "distributed", "recipe", "report")),
]
"""The packages from which users import, beside modules that are all their own."""


def offered(module):
    """The names that a package gathers from its modules, and those that it gives on demand."""
    tree = ast.parse(Path(module.__file__).read_text())
    found = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("slimtensors")
        for alias in node.names
    }
    return found | set(getattr(module, "_ON_DEMAND", ()))


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_names_are_those_that_are_listed(name):
    module = import_module(name)
    assert set(module.__all__) == offered(module)
    for offer in module.__all__:
        assert hasattr(module, offer), f"{name}.{offer}"
        assert offer in dir(module), f"{name}.{offer} is offered, and not shown"
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_the_package_knows_its_version():
    assert slimtensors.__version__ == version("slimtensors")


def loaded_by(code):
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.slow
def test_importing_brings_nothing_but_torch_and_safetensors():
    brought = loaded_by("import slimtensors") - loaded_by(LIGHT)
    ours = {"slimtensors", "slimtensors_command"}
    assert brought - sys.stdlib_module_names - ours <= {"_slimtensors_editable"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_has_fewer_than_500_lines(path):
    assert len(path.read_text().splitlines()) < 500


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_everything_public_has_a_docstring(path):
    module = import_module(name_of(path))
    assert module.__doc__, f"{path} does not say what it knows"
    for name, thing in vars(module).items():
        ours = getattr(thing, "__module__", None) == module.__name__
        if name.startswith("_") or not ours or not (inspect.isfunction(thing) or is_class(thing)):
            continue
        assert thing.__doc__, f"{path}: {name} has no docstring"
        assert not thing.__doc__.startswith(f"{name}("), f"{path}: {name} has no docstring"


def is_class(thing):
    return isinstance(thing, type)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_named_after_nothing(path):
    assert path.stem not in {"utils", "util", "helpers", "common", "base", "misc"}


def test_the_library_never_prints():
    for path in MODULES:
        if layer(name_of(path)) != LAYERS.index("cli"):
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            names = {n.func.id for n in calls if isinstance(n.func, ast.Name)}
            assert "print" not in names, path


def test_nothing_of_compressed_tensors_is_imported():
    for path in SOURCES:
        tops = {module.partition(".")[0] for module in imports(path)}
        assert not tops & {"compressed_tensors", "pickle", "marshal", "shelve"}, path
