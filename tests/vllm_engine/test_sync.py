"""A running engine follows a training loop: the same answers as a fresh load of the same step."""

import pytest
from vllm_engine import engine
from vllm_engine.engine import PROMPTS, EngineError


def train(folder, model, steps):
    """Train a model, publish each step, and save the last one as a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    from slimtensors.sync import publishing

    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    with publishing(folder / "run", trained, keyframe_every=2) as out:
        for step in range(steps):
            prompt = torch.tensor([PROMPTS[step % len(PROMPTS)]])
            optimizer.zero_grad()
            trained(input_ids=prompt, labels=prompt).loss.backward()
            optimizer.step()
            out.publish(step)
            out.wait()
            trained.save_pretrained(folder / f"step-{step}")
    return steps


def answer(folder, model, run=None, steps=(), **options):
    """Return the tokens of an engine, before and after each update to a store."""
    from vllm import LLM, SamplingParams

    from slimtensors.integrations.vllm_sync import EXTENSION, update_engine
    from slimtensors.sync import following

    llm = LLM(
        model=str(model),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        seed=0,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        worker_extension_cls=EXTENSION,
        **options,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False
    )

    def generate():
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = [x.outputs[0] for x in llm.generate(prompts, greedy, use_tqdm=False)]
        return [[list(x.token_ids), x.cumulative_logprob] for x in found]

    answers = [generate()]
    if run is None:
        return {"answers": answers}
    first = llm.collective_rpc("slim_update", args=(str(run), 1, None))
    answers.append(generate())
    reports = update_engine(llm, str(run))
    llm.reset_prefix_cache()
    answers.append(generate())
    again = update_engine(llm, str(run))
    assert following(run).newest().number == reports[0]["number"]
    return {"answers": answers, "reports": [*first, *reports, *again]}


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_an_engine_answers_as_a_fresh_load_of_the_same_step(models, tmp_path, name):
    work = tmp_path / "work"
    assert engine.in_fork(train, work, models[name], 3) == 3
    for step in range(3):
        for path in models[name].glob("tokenizer*"):
            (work / f"step-{step}" / path.name).write_bytes(path.read_bytes())
    followed = engine.in_fork(answer, tmp_path / "a", models[name], work / "run")
    last = engine.in_fork(answer, tmp_path / "b", work / "step-2")
    before, _, after = followed["answers"]
    assert after == last["answers"][0]
    assert after != before
    kinds = [(report["number"], bool(report["tensors"])) for report in followed["reports"]]
    assert kinds == [(1, True), (3, True), (3, False)]


def test_a_quantized_engine_is_refused_by_name(models, tmp_path):
    work = tmp_path / "work"
    engine.in_fork(train, work, models["llama"], 1)
    with pytest.raises(EngineError, match=r"quantized weights cannot follow.*layers\.0"):
        engine.in_fork(answer, tmp_path / "a", models["llama-W8A8"], work / "run")
