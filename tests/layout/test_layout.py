"""The shape of the source: layers, public names, what an import loads."""

import ast
import builtins
import inspect
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import slimtensors
from slimtensors import _moved

ROOT = Path(slimtensors.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
MODULES = [path for path in SOURCES if path.name != "__main__.py"]

LAYERS = [
    *["_core", "_moved", "errors", "tensor", "parallel"],
    *["codecs", "storage", "archive"],
    *["quantization", "runtime"],
    *["folder", "layerwise", "recipe", "checkpoint", "sync"],
    *["compat", "integrations", "transformers"],
    *["report", "cli"],
]
"""From the lowest to the highest; a module imports only from layers that come before its own."""

PACKAGE = {"__init__"}
"""The package itself belongs to no layer."""

LIGHT = "import torch, safetensors, safetensors.torch, numpy, importlib.metadata"


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, *, on_demand=True):
    """The modules that a file imports; without those inside `__getattr__` if not `on_demand`."""
    tree = ast.parse(path.read_text())
    if not on_demand:
        tree.body = [node for node in tree.body if not is_deferred(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_deferred(node):
    is_typing = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    return is_typing or getattr(node, "name", "") == "__getattr__"


def layer(module):
    """The position of a module in the layers; None for the package itself."""
    _, _, rest = module.partition(".")
    top = rest.partition(".")[0]
    return LAYERS.index(top) if rest and top not in PACKAGE else None


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_layers_below(path):
    here = layer(name_of(path))
    if here is None:
        return
    # A package may export names from above lazily: importing the package does not import them.
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
    tops |= {path.stem for path in MODULES if path.parent == ROOT} - PACKAGE
    assert tops | {"_core"} == set(LAYERS)


PUBLIC = [
    "slimtensors",
    *(f"slimtensors.{name}" for name in ("checkpoint", "codecs", "quantization", "runtime")),
    *(f"slimtensors.{name}" for name in ("layerwise", "folder", "compat", "archive")),
    *(f"slimtensors.{name}" for name in ("transformers", "transformers.compression")),
    *(f"slimtensors.{name}" for name in ("checkpoint.distributed", "recipe", "report", "sync")),
]
"""The packages from which users import."""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_listed(name):
    module = import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.{public}"
        assert public in dir(module), f"{name}.{public} is missing in dir()"
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def star_names(module):
    """Return the names that `from module import *` defines."""
    return getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]


@pytest.mark.parametrize("name", [*PUBLIC, *(f"slimtensors.{path}" for path in _moved.MOVED)])
def test_a_star_import_shadows_no_builtin_or_standard_module(name):
    names = set(star_names(import_module(name)))
    assert names.isdisjoint(dir(builtins))
    assert names.isdisjoint(sys.stdlib_module_names)


@pytest.mark.parametrize("path", _moved.MOVED)
def test_import_paths_of_earlier_versions_still_work(path):
    module = import_module(f"slimtensors.{path}")
    for target in _moved.MOVED[path]:
        current = import_module(f"slimtensors.{target}")
        for name in getattr(current, "__all__", ()):
            assert hasattr(module, name), f"slimtensors.{path}.{name}"
    for earlier, today in _moved.RENAMED.get(path, {}).items():
        assert getattr(module, earlier) is getattr(module, today)
    with pytest.raises(AttributeError, match=f"module 'slimtensors.{path}' has no attribute"):
        module.nothing  # noqa: B018


EARLIER = {
    "calibration": ["Batch", "Calibration", "Data", "batches_for"],
    "distributed": ["StorageReader", "StorageWriter", "consolidate", "distribute", "inspect"],
    "integrations.trainer": ["SlimCheckpoints"],
    "presets": ["Choice", "PRESETS", "find"],
    "pruning": ["Magnitude", "Method", "Wanted", "prune_model", "parse_structure"],
    "quantization.algorithms": ["GPTQ", "Method", "ModelReport", "quantize_model"],
    "quantized_folder": ["Rewrite", "calibrate_folder", "convert_folder", "quantize_folder"],
    "plan": ["Encoded", "Plan", "chain", "decode", "encode", "plain_parts", "plan_of"],
    "sparsity": ["BitmaskConfig", "Sparsity", "combined", "count_zeros", "is_24", "mask_plan"],
    "sparsity.config": ["BitmaskConfig", "SparsityConfig", "parse_section"],
    "summary": ["Stored", "Summary"],
    "spec": ["DTYPES", "Each", "Spec", "as_bytes", "same_bits", "serially", "view"],
    "tensors": ["CodedTensor", "QuantizedTensor", "quantize_", "rebuild"],
    "torchao": ["from_torchao", "to_torchao"],
}


@pytest.mark.parametrize("path", EARLIER)
def test_public_names_of_earlier_versions_still_import(path):
    names = {}
    exec(f"from slimtensors.{path} import {', '.join(EARLIER[path])}", names)


def test_methods_of_earlier_versions_still_work():
    from slimtensors.quantized_folder import Rewrite
    from slimtensors.tensors import SparseTensor

    from slimtensors.checkpoint import About, io, rng

    x = torch.eye(8)
    weight = SparseTensor.of(x)
    assert torch.equal(weight.dense(), x)
    assert torch.equal(weight.rows(torch.tensor([2])), x[2:3])
    assert slimtensors.Archive.of_files == slimtensors.Archive.from_files
    assert slimtensors.Huffman.cut is slimtensors.Huffman.split_parts
    assert {"sparsity_of", "stacked"} <= set(dir(import_module("slimtensors.sparsity")))
    assert hasattr(io, "save_checkpoint")
    assert hasattr(rng, "capture")
    assert About.place is About.suffix
    options = Rewrite("1GB", True)
    assert (options.max_shard_size, options.replace) == ("1GB", True)
    assert isinstance(replace(options, preset="dense"), Rewrite)


def test_the_package_knows_its_version():
    assert slimtensors.__version__ == version("slimtensors")


def loaded_by(code):
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
def test_importing_loads_nothing_but_torch_and_safetensors():
    loaded = loaded_by("import slimtensors; slimtensors.save")
    tops = {name.partition(".")[0] for name in loaded}
    light = {name.partition(".")[0] for name in loaded_by(LIGHT)} | sys.stdlib_module_names
    assert tops - light <= {"slimtensors", "_slimtensors_editable"}
    assert sum(name.startswith("slimtensors.") for name in loaded) <= 50


@pytest.mark.slow
def test_help_loads_neither_torch_nor_a_verb():
    code = "from slimtensors.cli import parser; parser([]).format_help()"
    loaded = {name for name in loaded_by(code) if name.startswith(("slimtensors.", "torch"))}
    light = (
        "slimtensors._moved",
        "slimtensors.cli",
        "slimtensors.cli.streams",
        "slimtensors.errors",
    )
    assert loaded == set(light)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_everything_public_has_a_docstring(path):
    if path.stem == "vllm_loader":
        pytest.importorskip("vllm")  # in an environment of its own
    module = import_module(name_of(path))
    assert module.__doc__, f"{path} has no docstring"
    for name, thing in vars(module).items():
        ours = getattr(thing, "__module__", None) == module.__name__
        if name.startswith("_") or not ours or not (inspect.isfunction(thing) or is_class(thing)):
            continue
        assert thing.__doc__, f"{path}: {name} has no docstring"
        assert not thing.__doc__.startswith(f"{name}("), f"{path}: {name} has no docstring"


def is_class(thing):
    return isinstance(thing, type)


def test_the_library_never_prints():
    for path in MODULES:
        if layer(name_of(path)) != LAYERS.index("cli"):
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            names = {n.func.id for n in calls if isinstance(n.func, ast.Name)}
            assert "print" not in names, path


def test_neither_compressed_tensors_nor_pickle_is_imported():
    for path in SOURCES:
        tops = {module.partition(".")[0] for module in imports(path)}
        assert not tops & {"compressed_tensors", "pickle", "marshal", "shelve"}, path
