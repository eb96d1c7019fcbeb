"""Weights of a running vLLM engine that follow a store of `slimtensors.sync`.

Start the engine with `worker_extension_cls=EXTENSION`, and call `update_engine` between requests.
This module does not import vLLM.
"""

from typing import Any

from torch import nn

from slimtensors.errors import MismatchError, UnsupportedOperationError, shorten_list
from slimtensors.sync import Follower, following
from slimtensors.tensor import Json

EXTENSION = "slimtensors.integrations.vllm_sync.SyncExtension"
"""Value of vLLM's option `worker_extension_cls`."""


class SyncExtension:
    """Adds `slim_update` to the workers of vLLM."""

    def slim_update(
        self, url: str, number: int, storage_options: dict[str, Any] | None = None
    ) -> Json:
        """Load a version of a store into the model of this worker; return what changed.

        Everything is decoded and verified before vLLM changes the first weight. vLLM then reloads
        the model from main memory, by its own loader: kernels may keep weights in another layout,
        which patches of single items would not reach.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined] # of vLLM's worker
        model: nn.Module = runner.get_model()
        refuse_quantized(model)
        followers: dict[str, Follower] = self.__dict__.setdefault("_slim_followers", {})
        follower = followers.setdefault(url, following(url, storage_options=storage_options))
        try:
            changed = [patch.name for patch in follower.patches(number=number)]
            if changed:
                runner.reload_weights(weights_iterator=iter(follower.tensors().items()))
        except BaseException:
            del followers[url]  # the next call loads everything
            raise
        return {"number": number, "tensors": len(changed), "requests": follower.traffic.requests}


def update_engine(
    engine: Any, url: str, *, storage_options: dict[str, Any] | None = None
) -> list[Json]:
    """Bring all workers of a vLLM engine to the newest version; return what each has done.

    Call it while no request is running. Answers that vLLM has cached are dropped. The store must
    contain the names of the engine's model folder; quantized models are refused.

    Args:
        engine: a `vllm.LLM`, started with `worker_extension_cls=EXTENSION`.
        url: folder or URL of the store.
        storage_options: passed to fsspec.
    """
    newest = following(url, storage_options=storage_options).newest()
    done: list[Json] = engine.collective_rpc(
        "slim_update", args=(url, newest.number, storage_options)
    )
    if not engine.reset_prefix_cache():
        raise MismatchError("vLLM has running requests, whose cached keys are of earlier weights")
    return done


def refuse_quantized(model: nn.Module) -> None:
    """Raise if layers compute with quantized weights, which a store of floats does not replace."""
    methods = {
        name: type(method).__name__
        for name, module in model.named_modules()
        if (method := getattr(module, "quant_method", None)) is not None
    }
    names = [name for name, method in methods.items() if not method.startswith("Unquantized")]
    if names:
        raise UnsupportedOperationError(
            f"quantized weights cannot follow a store: {shorten_list(names)}; serve the"
            " unquantized model"
        )
