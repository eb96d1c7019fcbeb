"""Remote storage on this machine: an S3 server (moto), and a proxy that injects faults."""

import http.client
import os
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

BUCKET = "models"


@contextmanager
def s3_server():
    """Yield the endpoint of an S3 server with an empty bucket."""
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield endpoint
    server.stop()


def s3_options(endpoint):
    """Return the storage options of an endpoint; only our own code repeats requests."""
    return {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
    }


@dataclass
class Fault:
    """Something that goes wrong with some requests."""

    kind: str
    """`error` (status 500), `drop` (no answer), `truncate` (half of the body), `stale` (the first
    listing again)."""
    method: str
    path: str
    """A part of path and query."""
    times: int
    seen: dict[str, tuple] = field(default_factory=dict)
    """Answers to repeat."""


class FaultyProxy:
    """A server that forwards requests to another one, except where a fault applies."""

    def __init__(self, endpoint):
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request that was forwarded."""
        self.on_request = lambda method, path: None
        self._target = urlsplit(endpoint)
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def forward(self):
                proxy.forward(self)

        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.forward)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def inject(self, kind, method="", path="", times=1):
        self.faults.append(Fault(kind, method, path, times))

    def take_fault(self, method, path):
        with self._lock:
            for fault in self.faults:
                if fault.times and fault.method in method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    def forward(self, handler):
        method, path = handler.command, handler.path
        body = read_body(handler)
        self.on_request(method, path)
        fault = self.take_fault(method, path)
        kind = fault.kind if fault else ""
        if kind == "drop":
            handler.close_connection = True
            return
        if kind == "error":
            answer(handler, 500, {}, b"<Error><Code>InternalError</Code></Error>")
            return
        if kind == "stale" and path in fault.seen:
            answer(handler, *fault.seen[path])
            return
        result = self.send(handler, method, path, body)
        self.requests.append((method, path))
        if kind == "stale":
            fault.seen[path] = result
        answer(handler, *result, cut=kind == "truncate")

    def send(self, handler, method, path, body):
        connection = http.client.HTTPConnection(self._target.hostname, self._target.port)
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in SKIPPED}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, dict(response.getheaders()), data


SKIPPED = {"transfer-encoding", "connection", "content-length", "expect"}


def read_body(handler):
    if "chunked" in handler.headers.get("Transfer-Encoding", ""):
        chunks = []
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            chunks.append(handler.rfile.read(size))
            handler.rfile.readline()
        while handler.rfile.readline().strip():
            pass
        return b"".join(chunks)
    return handler.rfile.read(int(handler.headers.get("Content-Length", 0)))


def answer(handler, status, headers, body, *, cut=False):
    handler.send_response(status)
    is_head = handler.command == "HEAD"
    size = headers.get("Content-Length", "0") if is_head else str(len(body))
    for name, value in headers.items():
        if name.lower() not in SKIPPED:
            handler.send_header(name, value)
    handler.send_header("Content-Length", size)
    handler.end_headers()
    if not is_head:
        handler.wfile.write(body[: len(body) // 2] if cut else body)
    if cut:
        handler.close_connection = True


@contextmanager
def faulty_proxy(endpoint):
    proxy = FaultyProxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def memory_store():
    """Yield the URL of an empty folder in memory."""
    files = pytest.importorskip("fsspec").filesystem("memory")
    name = f"/{uuid.uuid4().hex}"
    yield f"memory://{name}"
    if files.exists(name):
        files.rm(name, recursive=True)


def ended_process():
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""], env=os.environ)
    process.wait()
    return process.pid
