"""Run the real vLLM in forked processes: it is imported once, and every case starts afresh."""

import hashlib
import json
import os
import sys
import traceback

import torch

PROMPTS = [[1, 17, 33, 80, 5, 7], [60, 3, 3, 50], [*range(30, 60)]]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for functions of this module
    "TOKENIZERS_PARALLELISM": "false",
}


def import_vllm(hub):
    """Import everything that a case needs, once for all of them; `hub` is the cache of models."""
    os.environ |= SETTINGS | {"HF_HUB_CACHE": str(hub)}
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401


class EngineError(Exception):
    """A case failed: the error, and the path of its log."""


def in_fork(function, folder, *arguments, **options):
    """Return what a function returns in a forked process, as JSON; raise if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    result, log = folder / "result.json", folder / "log.txt"
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            result.write_text(json.dumps({"value": function(folder, *arguments, **options)}))
            code = 0
        except BaseException as error:
            traceback.print_exc()
            result.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    outcome = json.loads(result.read_text()) if result.exists() else {"error": f"exit {status}"}
    if "error" in outcome:
        raise EngineError(f"{outcome['error']}\n{log}\n{log.read_text()[-2000:]}")
    return outcome["value"]


def load(folder, model, *, answers=True, plugins=None, broken=None, start=None, **options):
    """Load a model; return what every rank loaded and, unless told not to, what it answers.

    Without answers the engine stops as soon as the weights are loaded. `plugins` are those
    that vLLM loads (default: all), `broken` is a name of vLLM to remove, or a function that raises.
    `start` is how vLLM starts processes: `fork` or `spawn`; the engine then has one, too.
    """
    if start is not None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": start}
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = plugins
    from vllm import LLM, SamplingParams

    if broken is not None:
        break_vllm(broken)

    record_weights(folder, stop=not answers)
    try:
        engine = LLM(
            model=str(model),
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            seed=0,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            num_gpu_blocks_override=64,
            **options,
        )
    except LoadedError:
        return {"ranks": read_records(folder), "log": (folder / "log.txt").read_text()}
    greedy = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = [x.outputs[0] for x in engine.generate(prompts, greedy, use_tqdm=False)]
    return {
        "ranks": read_records(folder) or engine.apply_model(describe_model),
        "tokens": [list(answer.token_ids) for answer in found],
        "logprobs": [answer.cumulative_logprob for answer in found],
    }


def choose_method(folder, model, *, plugins=None, **options):
    """Return how vLLM would quantize the model of a folder, or read a quantized one."""
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = plugins
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(model), **options).create_model_config()
    section = getattr(config.hf_config, "quantization_config", None)
    return {"method": config.quantization, "section": section}


def break_vllm(name):
    """Remove a name from vLLM, or let one of its functions raise."""
    if name == "register_model_loader":
        from vllm.model_executor import model_loader

        def refuse(load_format):
            raise TypeError("takes 2\npositional arguments")

        model_loader.register_model_loader = refuse
    else:
        module, _, attribute = name.rpartition(".")
        delattr(sys.modules[module], attribute)


class LoadedError(Exception):
    """Stops the engine after loading."""


def read_records(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def record_weights(folder, *, stop=False):
    """Write a hash of the weights as loaded, before kernels rearrange them; not in workers."""
    from vllm.model_executor.model_loader import DefaultModelLoader

    load_weights = DefaultModelLoader.load_weights

    def load_and_record(self, model, model_config):
        load_weights(self, model, model_config)
        world = torch.distributed
        rank = world.get_rank() if world.is_initialized() else 0
        record = {"loader": type(self).__name__, **describe_model(model)}
        (folder / f"rank-{rank}.json").write_text(json.dumps(record))
        if stop:
            raise LoadedError

    DefaultModelLoader.load_weights = load_and_record


def describe_model(model):
    """Return a hash of the weights and how layers compute with them."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    schemes = {type(getattr(module, "scheme", None)).__name__ for module in model.modules()}
    return {
        "hash": hash_weights(model.state_dict()),
        "methods": sorted(methods - {"NoneType"}),
        "schemes": sorted(schemes - {"NoneType"}),
    }


def hash_weights(state):
    total = hashlib.sha256()
    for name, x in sorted(state.items()):
        if x is not None:
            total.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            total.update(x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
