"""The real vLLM, in an environment of its own: `make test-vllm`."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """The cache of models from a hub."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="session", autouse=True)
def _vllm(hub):
    from vllm_engine import engine

    engine.import_vllm(hub)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders by name; made in another process, so that this one has no threads to fork."""
    from vllm_engine import engine
    from vllm_engine.folders import make_folders

    root = tmp_path_factory.mktemp("models")
    names = engine.in_fork(make_folders, root / "log", root)
    return {name: root / name for name in names}


@pytest.fixture(scope="session")
def loaded(models, tmp_path_factory):
    """Load a folder in a process of its own; equal calls share one."""
    from vllm_engine import engine

    done = {}

    def load(name, **options):
        key = (name, *sorted(options.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("case")
            done[key] = engine.in_fork(engine.load, folder, models[name], **options)
        return done[key]

    return load
