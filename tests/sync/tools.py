"""States to publish, a file system that can be blocked or broken, and a local S3 server."""

import errno
import os
import threading
from contextlib import contextmanager

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from strategies import same_bits

from slimtensors.sync import following


def make_state(seed=0):
    """Return tensors of many dtypes and shapes, with NaN payloads, -0.0 and tied names."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 96, generator=g).bfloat16()
    bits = torch.randint(-(2**15), 2**15, (33,), generator=g, dtype=torch.int16)
    state = {
        "weight": weight,
        "half": torch.randn(50, 7, generator=g).half(),
        "raw": bits.view(torch.bfloat16),
        "float8": torch.randn(40, generator=g).to(torch.float8_e4m3fn),
        "complex": torch.randn(5, generator=g, dtype=torch.complex64),
        "double": torch.randn(3, 3, 3, generator=g, dtype=torch.float64),
        "wide": torch.randn(9, generator=g, dtype=torch.complex128),
        "mask": torch.rand(77, generator=g) < 0.5,
        "steps": torch.tensor(7),
        "zero": torch.tensor(-0.0),
        "none": torch.zeros(0),
        "turned": torch.randn(20, 30, generator=g).t(),
    }
    state["tied"] = state["weight"]
    return state


def copy_of(state):
    """Return a copy in which the same names are tied."""
    made = {id(x): x.clone() for x in state.values()}
    return {name: made[id(x)] for name, x in state.items()}


def zeros(state):
    """Return a state of the same structure in which every bit is 0."""
    made = copy_of(state)
    for x in made.values():
        x.zero_()
    return made


def step_(state, seed):
    """Change a few items of a state in place, some of them to NaN."""
    g = torch.Generator().manual_seed(seed)
    flat = state["weight"].view(torch.int16).view(-1)
    flat[torch.randint(0, flat.numel(), (40,), generator=g)] += 1
    state["half"].view(-1)[seed % 350] = float("nan")
    state["mask"][seed % 77] ^= True
    state["wide"][seed % 9] += 1
    state["steps"] += 1
    state["turned"][seed % 30] += 1
    return state


def assert_equal(a, b):
    """Assert that two states have the same names and bits."""
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


def assert_follows(url, state, **options):
    """Assert that a new follower receives this state."""
    fresh = zeros(state)
    update = following(url, **options).update(fresh)
    assert_equal(fresh, state)
    return update


class Stubborn(MemoryFileSystem):
    """Memory that can be told to wait before it stores a file, or to fail."""

    protocol = "stubborn"
    store, pseudo_dirs = {}, [""]
    gate = threading.Event()
    entered = threading.Event()
    full = False

    def put_file(self, *args, **options):
        Stubborn.entered.set()
        assert Stubborn.gate.wait(60)
        if Stubborn.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().put_file(*args, **options)


fsspec.register_implementation("stubborn", Stubborn, clobber=True)


@contextmanager
def s3_bucket():
    """Yield the URL of a bucket on a local server, and its storage options."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    place = {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"}
    client = boto3.client("s3", **place, **keys)
    client.create_bucket(Bucket="runs")
    yield "s3://runs", {"key": "test", "secret": "test", "client_kwargs": place}
    client.close()
    server.stop()
