"""Real vLLM on the CPU with pictures; needs torchvision, which vLLM's processors of vision-language models import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from toy_vlm import table_of, write_vlm
from transformers import AutoModelForImageTextToText

from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.types import Sampling

pytest.importorskip("vllm")
pytest.importorskip("torchvision")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SAMPLING = Sampling(temperature=0.0, max_completion_length=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vlm(tmp_path_factory.mktemp("vlm"), "qwen2_5_vl", noise=0.2)


@pytest.fixture(scope="module")
def engines(folder: str) -> Iterator[tuple[VLLMEngine, TransformersEngine]]:
    context = EngineSetup(folder, torch.device("cpu"), torch.float32, (1,), 0, 512, 8)
    ours, oracle = VLLMEngine(kv_cache_memory_bytes=32 << 20), TransformersEngine()
    ours.setup(context)
    oracle.setup(context)
    yield ours, oracle
    ours.close()


def test_pictures_are_seen_as_the_trainer_sees_them_after_every_sync(engines, folder):
    prompts = table_of(folder).take(range(4))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    seen = []
    for version in (1, 2):  # the second time, features of the first weights must not come out of a cache
        for parameter in model.model.visual.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        outputs = []
        for engine in engines:
            engine.load_weights(model.named_parameters(remove_duplicate=False), version)
            arguments = {"seeds": range(4), "log_probs": True, "images": prompts.images}
            outputs.append(engine.generate(prompts.ids, SAMPLING, **arguments))
        for ours, expected in zip(*outputs, strict=True):
            assert ours.token_ids == expected.token_ids
            torch.testing.assert_close(
                torch.tensor(ours.log_probs), torch.tensor(expected.log_probs), atol=1e-4, rtol=0
            )
        seen.append([c.log_probs for c in outputs[0]])
    assert seen[0][2] == pytest.approx(seen[1][2], abs=1e-4), "no picture there"
    assert seen[0][0] != pytest.approx(seen[1][0], abs=1e-2)


def test_tokens_that_differ_from_the_trainer_s_are_an_error(engines, folder):
    prompts = table_of(folder).take([0])
    (images,), (ids,) = prompts.images, prompts.ids
    end = int(images.slots[-1]) + 1
    more = replace(images, slots=torch.cat([images.slots, torch.tensor([end])]), lengths=(images.lengths[0] + 1,))
    with pytest.raises(
        RuntimeError, match=rf"vLLM made {len(ids)} tokens of a prompt with images, the trainer {len(ids) + 1}"
    ):
        engines[0].generate([[*ids[:end], ids[end - 1], *ids[end:]]], SAMPLING, seeds=[0], images=[more])
