"""The embedded engine against stock transformers: `generate`, full forward passes, and itself in other batches."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_families import BASE, FAMILIES
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from lightning_rlhf.rollout.batch import Stop, draw, processed_logits
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.weights import checksum
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Completion, Sampling

EOS = 1
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 90)), [5, 6, 7, 9, 11], [*range(20, 60), 3]]


def setup(**changes: object) -> EngineSetup:
    context = EngineSetup(str(tiny_model()), torch.device("cpu"), torch.float32, (EOS,), 0, 256, 32)
    return replace(context, **changes)  # type: ignore[arg-type]


def policy(seed: int = 0) -> Qwen2ForCausalLM:
    """The tiny model with weights large enough for the next token to depend on everything before it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        layer = parameter.ndim > 1 and len(parameter) < 259  # larger than the embedding, whose tied head repeats tokens
        parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.3 if layer else 0.05))
    return model


def named(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


def engine_with(model: Qwen2ForCausalLM, **options: object) -> TransformersEngine:
    engine = TransformersEngine(**options)  # type: ignore[arg-type]
    engine.setup(setup())
    engine.load_weights(named(model), 1)
    return engine


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return policy()


@pytest.fixture(scope="module")
def engine(model: Qwen2ForCausalLM) -> TransformersEngine:
    return engine_with(model)


def repeated(prompts: list[list[int]], n: int) -> list[list[int]]:
    return [p for p in prompts for _ in range(n)]


@contextmanager
def inputs(engine: TransformersEngine) -> Iterator[list[tuple[int, ...]]]:
    """(rows, columns) of each forward pass."""
    shapes: list[tuple[int, ...]] = []
    handle = engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    handle.remove()


def full_log_probs(model: Qwen2ForCausalLM, prompt: list[int], completion: Completion, sampling: Sampling) -> Tensor:
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    return (
        processed_logits(logits, sampling).log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    )


# -- decoding ----------------------------------------------------------------------------------------------------------


def test_greedy_equals_stock_generate_with_very_unequal_prompts(
    engine: TransformersEngine, model: Qwen2ForCausalLM
) -> None:
    sampling = Sampling(temperature=0.0, max_completion_length=24)
    out = engine.generate(PROMPTS, sampling, seeds=[0] * len(PROMPTS))
    for prompt, completion in zip(PROMPTS, out, strict=True):
        ids = torch.tensor([prompt])
        stock = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert completion.token_ids == stock[0, len(prompt) :].tolist()
    assert len({tuple(c.token_ids) for c in out}) == len(PROMPTS)
    assert all(len(set(c.token_ids)) > 3 for c in out), "the model must not repeat one token, or the test sees nothing"


def test_a_request_without_a_seed_is_greedy_among_others_that_are_not(engine: TransformersEngine) -> None:
    sampling = Sampling(temperature=1.3, top_p=0.8, top_k=50, max_completion_length=12)
    mixed = engine.generate(repeated(PROMPTS, 2), sampling, seeds=[7, None] * len(PROMPTS), log_probs=True)
    alone = engine.generate(PROMPTS, sampling, seeds=[7] * len(PROMPTS), log_probs=True)
    for one, among in zip(alone, mixed[::2], strict=True):  # batches of other sizes round differently
        assert (one.token_ids, one.finish_reason) == (among.token_ids, among.finish_reason)
        assert one.log_probs == pytest.approx(among.log_probs, abs=1e-5)
    assert mixed[1::2] != mixed[::2]
    greedy = engine.generate(PROMPTS, sampling.greedy, seeds=[7] * len(PROMPTS))
    assert [c.token_ids for c in mixed[1::2]] == [c.token_ids for c in greedy]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_completion_length=16),
        Sampling(temperature=0.6, max_completion_length=16),
        Sampling(temperature=1.3, top_p=0.8, top_k=50, min_p=0.01, max_completion_length=16),
        Sampling(temperature=0.0, max_completion_length=16),
    ],
)
def test_log_probs_are_those_of_a_full_forward_pass(
    engine: TransformersEngine, model: Qwen2ForCausalLM, sampling: Sampling
) -> None:
    prompts = repeated(PROMPTS, 3)
    for prompt, completion in zip(
        prompts, engine.generate(prompts, sampling, seeds=range(15), log_probs=True), strict=True
    ):
        assert completion.log_probs is not None
        expected = full_log_probs(model, prompt, completion, sampling)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=2e-5, rtol=1e-5)


def test_log_probs_are_left_out_unless_asked_for(engine: TransformersEngine) -> None:
    assert engine.generate([[5]], Sampling(max_completion_length=2), seeds=[0])[0].log_probs is None


def test_no_prompts_give_no_completions(engine: TransformersEngine) -> None:
    assert engine.generate([], Sampling(), seeds=[]) == []


# -- draws -------------------------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_the_batch_they_are_in(model: Qwen2ForCausalLM) -> None:
    sampling = Sampling(max_completion_length=20)
    prompts, seeds = repeated(PROMPTS, 4), [17 * i + 3 for i in range(20)]
    together = engine_with(model, batch_size=64).generate(prompts, sampling, seeds=seeds)
    small = engine_with(model, batch_size=3)
    assert small.generate(prompts, sampling, seeds=seeds) == together
    order = random.Random(0).sample(range(20), 20)
    shuffled = small.generate([prompts[i] for i in order], sampling, seeds=[seeds[i] for i in order])
    assert shuffled == [together[i] for i in order]
    alone = [small.generate([p], sampling, seeds=[s])[0] for p, s in zip(prompts, seeds, strict=True)]
    assert alone == together
    halves = [c for a in (0, 10) for c in small.generate(prompts[a : a + 10], sampling, seeds=seeds[a : a + 10])]
    assert halves == together, "two ranks"


def test_seeds_decide_the_sample(engine: TransformersEngine) -> None:
    sampling = Sampling(max_completion_length=12)
    one, two, again = engine.generate([[5, 6]] * 3, sampling, seeds=[1, 2, 1])
    assert one == again
    assert one != two
    big = engine.generate([[5, 6]] * 2, sampling, seeds=[2**62 + 1, 2**62 + 1 + 2**32])
    assert big[0] != big[1], "all bits of a seed count"


def test_generating_leaves_the_global_generators_alone(engine: TransformersEngine) -> None:
    torch.manual_seed(3)
    random.seed(3)
    before, before_python = torch.get_rng_state(), random.getstate()
    engine.generate([[5, 6]], Sampling(max_completion_length=4), seeds=[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == before_python


def test_draw_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    uniforms = torch.tensor([0.0, 0.0999, 0.1001, 0.6999, 0.7001, 1 - 2**-53], dtype=torch.float64)
    tokens, log_probs = draw(probs.log().expand(6, -1), uniforms)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]
    torch.testing.assert_close(log_probs, probs.log()[tokens])
    frequencies = draw(probs.log().expand(20000, -1), torch.rand(20000, dtype=torch.float64))[0].bincount()
    torch.testing.assert_close(frequencies / 20000, probs[:5], atol=0.02, rtol=0)


def test_truncation_keeps_the_likeliest_tokens() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    def kept(**options: float) -> list[bool]:
        return processed_logits(logits, Sampling(**options)).isfinite()[0].tolist()  # type: ignore[arg-type]

    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_k=9) == [True] * 4
    assert kept(top_p=0.65) == [True, True, False, False]
    assert kept(top_p=0.01) == [True, False, False, False]
    assert kept(min_p=0.6) == [True, True, False, False]
    assert kept(temperature=0.25, min_p=0.6) == [True, False, False, False], "min_p acts after the temperature"
    torch.testing.assert_close(processed_logits(logits, Sampling(temperature=0.5)), logits * 2)


# -- prefill -----------------------------------------------------------------------------------------------------------


def test_each_prompt_is_prefilled_once_and_a_common_prefix_once(model: Qwen2ForCausalLM) -> None:
    engine = engine_with(model)
    prefix = list(range(10, 60))
    prompts = repeated([[*prefix, 3], [*prefix, 4, 5, 6], [*prefix, 4, 7]], 4)
    sampling = Sampling(max_completion_length=6, ignore_eos=True)
    with inputs(engine) as shapes:
        shared = engine.generate(prompts, sampling, seeds=range(12), log_probs=True)
    assert shapes == [(1, 50), (3, 3)] + [(12, 1)] * 5
    separate = [engine.generate([p], sampling, seeds=[i], log_probs=True)[0] for i, p in enumerate(prompts)]
    for a, b in zip(shared, separate, strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=2e-5, rtol=1e-5)


def test_prompts_of_very_unequal_lengths_are_not_padded_to_the_longest(model: Qwen2ForCausalLM) -> None:
    engine = engine_with(model)
    with inputs(engine) as shapes:
        engine.generate(PROMPTS, Sampling(max_completion_length=1), seeds=range(5))
    assert shapes == [(3, 5), (2, 70)]


def test_one_prompt_that_is_the_beginning_of_another(engine: TransformersEngine) -> None:
    sampling = Sampling(temperature=0.0, max_completion_length=8)
    long = list(range(10, 100))
    together = engine.generate([long, long[:70], long[:71]], sampling, seeds=[0] * 3)
    assert together == [engine.generate([p], sampling, seeds=[0])[0] for p in (long, long[:70], long[:71])]


# -- rows that come and go ---------------------------------------------------------------------------------------------


def varied(model: Qwen2ForCausalLM, batch_size: int) -> TransformersEngine:
    """An engine with so many EOS tokens that responses end at very different lengths."""
    engine = TransformersEngine(batch_size=batch_size)
    engine.setup(setup(eos_token_ids=tuple(range(1, 20))))
    engine.load_weights(named(model), 1)
    return engine


def test_a_row_that_ends_makes_room_for_the_next(model: Qwen2ForCausalLM) -> None:
    engine, prompts = varied(model, 4), [[5, 6, i] for i in range(40, 60)]
    with inputs(engine) as shapes:
        out = engine.generate(prompts, Sampling(max_completion_length=30), seeds=range(20))
    lengths = [len(c.token_ids) for c in out]
    steps = [rows for rows, columns in shapes if columns == 1]
    assert sum(steps) == sum(lengths) - 20, "nothing is computed for a row that has ended"
    assert max(rows for rows, _ in shapes) == 4
    one_after_the_other = sum(max(lengths[i : i + 4]) - 1 for i in range(0, 20, 4))
    assert len(steps) < 0.8 * one_after_the_other
    assert varied(model, 64).generate(prompts, Sampling(max_completion_length=30), seeds=range(20)) == out


def test_a_batch_is_filled_up_when_an_eighth_of_it_has_ended(model: Qwen2ForCausalLM) -> None:
    engine, prompts = varied(model, 16), [[i, 5, 6] for i in range(40, 104)]
    with inputs(engine) as shapes:
        engine.generate(prompts, Sampling(max_completion_length=30), seeds=range(64))
    reads = [rows for rows, columns in shapes if columns > 1]
    assert sum(reads) == 64
    assert reads[0] == 16
    assert min(reads[:-1]) == 2
    after = [shapes[i + 1][0] for i, (_, columns) in enumerate(shapes) if columns > 1]
    assert max(after) == 16, "to the full size"


def test_responses_start_in_order_and_a_prompt_is_read_once_however_they_are_split(model: Qwen2ForCausalLM) -> None:
    a, b = [5, 6, 7], list(range(20, 29))
    for batch_size, prompts in ((1, [a, b, a, b]), (2, [a, a, a, b, b, b]), (3, [a] * 8 + [b] * 8)):
        engine = varied(model, batch_size)
        with inputs(engine) as shapes:
            out = engine.generate(prompts, Sampling(max_completion_length=9), seeds=range(len(prompts)))
        assert [shape for shape in shapes if shape[1] > 1] == [(1, 3), (1, 9)]
        assert out == varied(model, 64).generate(prompts, Sampling(max_completion_length=9), seeds=range(len(prompts)))


@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_rows_that_come_and_go_are_decoded_like_stock_generate(kind: str, tmp_path: Path) -> None:
    """Learned positions; sliding windows; attention sinks; keys that are wider than values."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(BASE | FAMILIES[kind] | {"eos_token_id": None}))
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.requires_grad_(False).parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(batch_size=3)
    engine.setup(setup(model=str(tmp_path), max_model_len=32))  # so responses end at very different lengths
    engine.load_weights(model.state_dict(keep_vars=True).items(), 1)
    prompts = [torch.randint(3, 97, (n,)).tolist() for n in (3, 29, 9, 14, 25, 30, 1, 12, 2, 17)]
    sampling = Sampling(temperature=0.0, max_completion_length=25, ignore_eos=True)
    for prompt, completion in zip(prompts, engine.generate(prompts, sampling, seeds=[0] * 10), strict=True):
        ids, new = torch.tensor([prompt]), min(25, 32 - len(prompt))
        stock = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        assert completion.token_ids == stock[0, len(prompt) :].tolist()


def test_sliding_window_models_are_decoded_like_stock_generate(tmp_path: object) -> None:
    tiny = AutoTokenizer.from_pretrained(tiny_model())
    config = Qwen2Config.from_pretrained(tiny_model())
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 8, 1
    config.layer_types = ["full_attention", "sliding_attention"]
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(str(tmp_path))
    tiny.save_pretrained(str(tmp_path))
    engine = TransformersEngine()
    engine.setup(setup(model=str(tmp_path)))
    engine.load_weights(named(model), 1)
    prefix = list(range(10, 50))
    prompts = [[*prefix, 3], [*prefix, 4, 5, 6, 7, 8, 9], [*prefix, 4, 7]]
    for prompt, completion in zip(
        prompts,
        engine.generate(prompts, Sampling(temperature=0.0, max_completion_length=12), seeds=[0] * 3),
        strict=True,
    ):
        ids = torch.tensor([prompt])
        stock = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert completion.token_ids == stock[0, len(prompt) :].tolist()


# -- ends --------------------------------------------------------------------------------------------------------------


def many(engine: TransformersEngine, sampling: Sampling, n: int = 200) -> list[Completion]:
    return engine.generate([[5, 6, 7]] * n, sampling, seeds=range(n))


def test_every_eos_id_ends_a_response_and_stays_in_it(model: Qwen2ForCausalLM) -> None:
    engine = TransformersEngine()
    eos = (EOS, 40, 41, 42, 43, 44, 45, 46, 47)
    engine.setup(setup(eos_token_ids=eos))
    engine.load_weights(named(model), 1)
    out = many(engine, Sampling(max_completion_length=30, stop_token_ids=(50,)))
    ends = {*eos, 50}
    for completion in out:
        stopped = completion.token_ids[-1] in ends
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == 30
        assert not ends & set(completion.token_ids[:-1])
    assert len({c.token_ids[-1] for c in out if c.finish_reason == "stop"}) > 2
    assert any(c.finish_reason == "length" for c in out)
    ignored = many(engine, Sampling(max_completion_length=30, stop_token_ids=(50,), ignore_eos=True))
    assert all(len(c.token_ids) == 30 and c.finish_reason == "length" for c in ignored)
    assert any(ends & set(c.token_ids) for c in ignored)


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "sampled"])
def test_a_policy_that_gives_nan_is_named(seed: int | None) -> None:
    broken = policy()
    next(broken.parameters())[5, 0] = torch.nan
    with pytest.raises(RuntimeError, match="the policy's logits are not finite"):
        engine_with(broken).generate([[5, 6]], Sampling(max_completion_length=4), seeds=[seed])


def test_no_eos_before_the_minimum_length(model: Qwen2ForCausalLM) -> None:
    engine = TransformersEngine()
    engine.setup(setup(eos_token_ids=tuple(range(1, 130))))
    engine.load_weights(named(model), 1)
    lengths = [len(c.token_ids) for c in many(engine, Sampling(max_completion_length=20, min_completion_length=5))]
    assert min(lengths) == 6
    assert min(len(c.token_ids) for c in many(engine, Sampling(max_completion_length=20))) == 1


def test_stop_strings_end_a_response(engine: TransformersEngine, model: Qwen2ForCausalLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    sampling = Sampling(max_completion_length=60, ignore_eos=False)
    free = many(engine, sampling, 50)
    texts = [tokenizer.decode(c.token_ids) for c in free]
    stop = next(t[3:5] for t in texts if len(t) > 8 and t[3:5].isprintable() and t[3:5].isascii() and " " not in t[3:5])
    stopped = many(engine, replace(sampling, stop=(stop, "never to be seen")), 50)
    small = engine_with(model, batch_size=8)
    assert many(small, replace(sampling, stop=(stop, "never to be seen")), 50) == stopped
    assert any(c.finish_reason == "stop" and stop in tokenizer.decode(c.token_ids) for c in stopped)
    for a, b in zip(free, stopped, strict=True):
        assert a.token_ids[: len(b.token_ids)] == b.token_ids
        assert stop not in tokenizer.decode(b.token_ids[:-1])
        assert (stop in tokenizer.decode(a.token_ids)) == (stop in tokenizer.decode(b.token_ids))


def test_stop_strings_read_the_tokenizer_once_not_in_each_turn(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noted(path: str, **kwargs: Any) -> Any:
        read.append(path)
        return stock(path, **kwargs)

    stock = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noted)
    for stop in ("a", "b", "a"):
        engine.generate([[5, 6]], Sampling(max_completion_length=3, stop=(stop,)), seeds=[1])
    assert len(read) <= 1


def test_a_stop_string_before_the_minimum_length_is_passed_over_and_ends_the_response_when_it_comes_again() -> None:
    def length(text: str, least: int, *stop: str) -> int:
        ids, ends = tokenizer(text)["input_ids"], Stop([], stop, least, tokenizer).ends
        return next((n for n in range(1, len(ids) + 1) if ends(ids[:n])), 0)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())  # a token is a byte
    assert length("abcdefgh", 4, "bc") == 0
    assert length("abcdefgh", 2, "bc") == 3
    assert length("abcdebcfgh", 4, "bc") == 7
    assert length("aaaa", 2, "aa") == 3
    assert length("abcéfghi", 4, "é", "never to be seen") == 5
    assert length("abcéfghi", 5, "é") == 0
    assert length("abcdefghijklmnop", 3, "op") == 16


def test_the_longest_sequence_is_max_model_len(model: Qwen2ForCausalLM) -> None:
    engine = TransformersEngine()
    engine.setup(setup(max_model_len=10))
    engine.load_weights(named(model), 1)
    sampling = Sampling(max_completion_length=8, ignore_eos=True)
    out = engine.generate([[5] * 7, [5] * 2], sampling, seeds=[0, 1])
    assert [len(c.token_ids) for c in out] == [3, 8]
    with pytest.raises(ValueError, match=r"1 to 9 tokens .* 10\), got 12"):
        engine.generate([[5] * 12], sampling, seeds=[0])
    with pytest.raises(ValueError, match="got 0"):
        engine.generate([[]], sampling, seeds=[0])


def test_an_engine_serves_another_run_or_is_built_anew(model: Qwen2ForCausalLM) -> None:
    engine = engine_with(model)
    held, last = engine.model, engine.generate([[5, 6]], Sampling(max_completion_length=9).greedy, seeds=[None])[0]
    third = last.token_ids[2]
    engine.setup(setup(eos_token_ids=(third,), max_model_len=64))
    assert engine.model is held
    (cut,) = engine.generate([[5, 6]], Sampling(max_completion_length=9).greedy, seeds=[None])
    assert cut.token_ids == last.token_ids[: last.token_ids.index(third) + 1]
    engine.setup(setup(max_model_len=256))  # as long as it was made for
    assert engine.model is held
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    changes = ({"max_model_len": 300}, {"dtype": torch.bfloat16}, {"config_overrides": one_layer})
    for change in (*changes, changes[-1] | {"beside": True}):
        engine.setup(setup(**change))
        assert engine.model is not held
        assert engine.weight_version == -1
        held = engine.model
    assert engine.model.config.num_hidden_layers == 1


def test_options_of_other_engines_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match=r"sampling\.extra must be empty .*, got bad_words: leave it out"):
        engine.generate([[5]], Sampling(extra={"bad_words": ["x"]}), seeds=[0])
    with pytest.raises(ValueError, match="batch_size"):
        TransformersEngine(batch_size=0)


# -- weights and sleep -------------------------------------------------------------------------------------------------


def test_generating_without_usable_weights_is_an_error(model: Qwen2ForCausalLM) -> None:
    engine = TransformersEngine()
    sampling = Sampling(max_completion_length=2)
    with pytest.raises(RuntimeError, match="no usable weights"):
        engine.generate([[5]], sampling, seeds=[0])
    engine.setup(setup())
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="no usable weights"):
        engine.generate([[5]], sampling, seeds=[0])
    engine.load_weights(named(model), 7)
    assert engine.weight_version == 7
    engine.sleep(2)
    assert engine.weight_version == -1
    assert engine.checksum() is None
    assert sum(p.numel() for p in engine.model.parameters()) == 0, "level 2 gives the memory back"
    with pytest.raises(RuntimeError, match="asleep"):
        engine.load_weights(named(model), 8)
    engine.wake(["weights", "kv_cache"])
    with pytest.raises(RuntimeError, match="no usable weights"):
        engine.generate([[5]], sampling, seeds=[0])


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake_twice_give_the_loaded_weights_output(level: int) -> None:
    engine = TransformersEngine()
    engine.setup(setup())
    sampling = Sampling(temperature=0.0, max_completion_length=12)
    outputs = []
    for version in (1, 2):
        weights = policy(version)
        engine.wake(["weights"])
        engine.load_weights(named(weights), version)
        engine.wake(["kv_cache"])
        outputs.append(engine.generate([[5, 6, 7]], sampling, seeds=[0]))
        assert outputs[-1] == engine_with(weights).generate([[5, 6, 7]], sampling, seeds=[0])
        assert engine.checksum() == checksum(named(weights))
        engine.sleep(level)
        if level == 1:
            assert engine.weight_version == version
            with pytest.raises(RuntimeError):
                engine.generate([[5]], sampling, seeds=[0])
            engine.wake(["weights", "kv_cache"])
            assert engine.generate([[5, 6, 7]], sampling, seeds=[0]) == outputs[-1]
            engine.sleep(level)
    assert outputs[0] != outputs[1]


def test_an_engine_that_was_closed_asleep_is_built_awake(model: Qwen2ForCausalLM) -> None:
    engine = engine_with(model)
    engine.sleep(2)
    engine.close()
    engine.setup(setup())
    engine.load_weights(named(model), 1)
    assert engine.generate([[5]], Sampling(max_completion_length=2), seeds=[0])


def test_an_incomplete_or_foreign_stream_is_an_error_and_leaves_no_version(model: Qwen2ForCausalLM) -> None:
    engine = engine_with(model)
    with pytest.raises(ValueError, match=r"1 weights were not sent .* 'model\.norm\.weight'"):
        engine.load_weights([(n, p) for n, p in named(model) if n != "model.norm.weight"], 2)
    assert engine.weight_version == -1
    with pytest.raises(ValueError, match="no weight 'actor"):
        engine.load_weights([("actor.model.norm.weight", torch.zeros(64))], 2)
    with pytest.raises(ValueError, match=r"\(64,\), got \(32,\)"):
        engine.load_weights([("model.norm.weight", torch.zeros(32))], 2)
    engine.load_weights(((n, p) for n, p in named(model) if n != "lm_head.weight"), 3)
    assert engine.weight_version == 3, "one name of a tied parameter is enough"


def test_the_engine_copies_what_it_is_given(model: Qwen2ForCausalLM) -> None:
    weights = {n: p.clone() for n, p in named(model)}
    engine = engine_with(model)
    engine.load_weights(weights.items(), 2)
    before = engine.checksum()
    for tensor in weights.values():
        tensor.zero_()
    assert engine.checksum() == before


def test_bfloat16_engine_takes_float32_weights(model: Qwen2ForCausalLM) -> None:
    engine = engine_with(model, dtype="bfloat16")
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert engine.checksum() == checksum(named(model))
    out = engine.generate([[5, 6]], Sampling(max_completion_length=4), seeds=[0], log_probs=True)[0]
    assert all(math.isfinite(x) for x in out.log_probs or [])
