"""What the tests of damaged and hostile files share."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "hostile.safetensors"
