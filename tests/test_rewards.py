"""The ready-made reward functions."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from lightning_rlhf.rewards import (
    FormatReward,
    LengthPenalty,
    RewardError,
    RewardModel,
    exact_answer,
    final_answer,
    first_number,
    numeric_answer,
    reasoning_gym,
)
from lightning_rlhf.sources import TaskRows
from lightning_rlhf.tiny import tiny_model


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  42 ", "42"),
        (r"so \boxed{1} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{2} after all, and \boxed{unfinished", "2"),
        ("work\n#### 18\nbye", "18"),
        ("Answer: 3\nNo. ANSWER:  4\nbye", "4"),
        ("the answer:\n7", "the answer:\n7"),
        ("<answer>1</answer> <answer>\n5\n</answer> ok", "5"),
        ("<think>answer: 9 or \\boxed{8}</think>\n 10", "10"),
        (r"answer: 1 #### 2 <answer>3</answer> \boxed{4}", "4"),
        ("", ""),
    ],
)
def test_the_final_answer_is_the_last_marked_one_or_all_of_the_text(text, answer):
    assert final_answer(text) == answer


def test_exact_answer_compares_the_final_answers_of_both_sides():
    completions = ["so #### 18", "It is\n  PARIS.", "19", chat(r"\boxed{18}"), "anything", "$x$"]
    answers = ["eggs ...\n#### 18", "it is paris", "18", 18, None, "x"]
    assert exact_answer(completions, answer=answers) == [1.0, 1.0, 0.0, 1.0, None, 1.0]


@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth"])
def test_answers_come_from_any_of_the_usual_columns(column):
    assert exact_answer(["4"], **{column: ["4"]}, other=["5"]) == [1.0]


def test_a_data_set_without_an_answer_column_stops_the_run():
    with pytest.raises(RewardError, match="one of the columns answer, solution, ground_truth"):
        exact_answer(["4"], question=["4"])


def test_first_number_is_the_first_run_of_digits_and_nothing_else():
    completions = [" 34\n7 + 5", "x34", "134", "3 4", "none", chat("34!"), "034"]
    assert first_number(completions, answer=["34"] * 6 + [34]) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_numeric_answer_knows_equal_expressions():
    completions = [r"\boxed{0.5}", r"it is $\frac{2}{4}$", r"\boxed{0.51}", "no idea", chat(r"\boxed{x(x+1)}"), "#"]
    answers = ["1/2", r"$\frac{1}{2}$", "1/2", "3", "x^2+x", ""]
    assert numeric_answer(completions, answer=answers) == [1.0, 1.0, 0.0, 0.0, 1.0, None]


def test_numeric_answer_works_outside_the_main_thread():
    out = []
    thread = threading.Thread(target=lambda: out.append(numeric_answer([r"\boxed{\frac12}"], answer=["0.5"])))
    thread.start()
    thread.join()
    assert out == [[1.0]]


def task_columns(task, size=2, **args):
    rows = list(TaskRows(task, size, seed=5, args=args))
    return rows, {name: [row[name] for row in rows] for name in ("task", "task_args", "entry")}


def test_a_task_is_scored_by_its_own_verifier():
    rows, columns = task_columns("chain_sum", min_terms=2, max_terms=2)
    assert reasoning_gym([f"<think>1</think>answer: {row['answer']}.0" for row in rows], **columns) == [1.0, 1.0]
    assert reasoning_gym([chat(f"<answer>{row['answer']}</answer>") for row in rows], **columns) == [1.0, 1.0]
    assert max(reasoning_gym(["answer: none"] * 2, **columns)) < 0.1


def test_the_verifier_has_the_options_of_the_task():
    _rows, columns = task_columns("puzzle24", size=1)  # numbers up to 10
    assert reasoning_gym(["8*3*1*1"], **columns) == [1.0]
    _rows, columns = task_columns("puzzle24", size=1, max_value=6)
    assert reasoning_gym(["8*3*1*1"], **columns) == [0.01]


def test_the_format_is_matched_from_end_to_end_across_lines():
    think = FormatReward()
    good, bad = "<think>a\nb</think>\nc", ["no", "x <think>a</think> b", "<think>a<think>b</think>c", "<think>a"]
    assert think([good, chat(good), *bad]) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert FormatReward(pattern=r"\d+")(["12", "12a"]) == [1.0, 0.0]


def test_the_length_penalty_is_that_of_dapo():
    lengths = [0, 6, 7, 8, 10, 12]
    expected = [0, 0, -0.125, -0.25, -0.5, -0.5]
    assert LengthPenalty(max_length=10, buffer=4, factor=0.5)([[1] * n for n in lengths]) == expected
    with pytest.raises(ValueError, match="buffer=11, max_length=10"):
        LengthPenalty(max_length=10, buffer=11)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A random reward model whose padding token is its EOS, as many are."""
    path = tmp_path_factory.mktemp("reward-model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, num_labels=1, **size)
        config.pad_token_id = tokenizer.eos_token_id
        Qwen2ForSequenceClassification(config).save_pretrained(path)
        Qwen2ForCausalLM(config).save_pretrained(path / "language-model")
    return path


def test_a_reward_model_scores_each_sequence_as_it_would_alone(reward_model):
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    end = tokenizer.eos_token
    prompts = ["2+2=", [{"role": "user", "content": "hello"}], "a", "b"]
    completions = ["4", chat("hi there, you"), "bc" * 9 + end, f"c{end}{end}"]
    scored = RewardModel(str(reward_model), dtype="float32", batch_size=3)(prompts, completions)

    model = Qwen2ForSequenceClassification.from_pretrained(reward_model)
    texts = ["2+2=4", "user: hello\nassistant: hi there, you\n", "a" + "bc" * 9 + end, f"bc{end}{end}"]
    assert tokenizer(texts[3]).input_ids[-1] == tokenizer.pad_token_id
    with torch.no_grad():
        alone = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert scored == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in alone}) == 4


def test_a_reward_model_can_wrap_text_as_a_conversation(reward_model):
    wrapped = RewardModel(str(reward_model), dtype="float32", chat_template=True)(["hello"], ["hi"])
    assert wrapped == RewardModel(str(reward_model), dtype="float32")([[{"role": "user", "content": "hello"}]], ["hi"])
    assert wrapped != RewardModel(str(reward_model), dtype="float32")(["hello"], ["hi"])


def test_what_is_no_reward_model_is_refused(reward_model, tmp_path):
    with pytest.raises(RewardError, match=r"needs a trained reward model, but .* lacks score\.weight"):
        RewardModel(str(reward_model / "language-model"))(["a"], ["b"])
    with pytest.raises(RewardError, match="cannot load"):
        RewardModel(str(tmp_path))(["a"], ["b"])
    with pytest.raises(ValueError, match="bfloat61"):
        RewardModel("x", dtype="bfloat61")
