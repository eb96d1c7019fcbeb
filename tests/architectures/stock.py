"""A long-lived process with transformers and compressed-tensors, without slimtensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "stock_loader.py"


class StockProcess:
    """Sends requests to `programs/stock_loader.py`, which starts on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "StockProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
        self._stop()

    def load(self, folder: Path, name: str, output: Path) -> dict:
        """Load a folder by the class `name` and write its dense weights to `output`."""
        return self._ask(do="load", folder=str(folder), output=str(output), **{"class": name})

    def quantize(self, folder: Path, name: str, config: dict, output: Path) -> dict:
        """Let compressed-tensors quantize a dense folder."""
        request = {"folder": str(folder), "class": name, "config": config, "output": str(output)}
        return self._ask(do="quantize", **request)

    def _ask(self, **request: object) -> dict:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin, "a pipe was requested"
        assert self._process.stdout, "a pipe was requested"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            status = self._stop()
            return {"error": f"the process ended with status {status}"}
        return json.loads(answer)

    def _stop(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.communicate()
        return process.returncode
