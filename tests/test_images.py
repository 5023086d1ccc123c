"""Pictures in prompts: rows, token ids, positions, batches, and decoding with the embedded engine."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_vlm import ROWS, answered, ask, inputs_of, picture, table_of, write_vlm
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, Gemma3Config, LlamaConfig

from lightning_rlhf import PromptDataModule
from lightning_rlhf.images import (
    ImageEncoder,
    auto_class,
    collapsed,
    continued,
    is_vision_language,
    open_picture,
    pack_images,
)
from lightning_rlhf.packing import pack
from lightning_rlhf.prompts import PromptEncoder, PromptTable
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import Sampling

PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vlm(tmp_path_factory.mktemp("vlm"), "qwen2_5_vl", noise=0.2)


def png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


# -- rows ----------------------------------------------------------------------------------------------------------------


def test_a_prompt_has_a_placeholder_per_feature_and_the_processor_s_patches(folder):
    table = table_of(folder)
    prompts = table.take(range(4))
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), ImageEncoder.load(folder)
    assert [table.longest, *map(len, table.ids)] == [max(map(len, prompts.ids)), *map(len, prompts.ids)]
    for row, ids, images in zip(ROWS, prompts.ids, prompts.images, strict=True):
        pictures = row.get("images") or [p for p in [row.get("image")] if p]
        if not pictures:
            assert images is None
            continue
        expected = encoder.processor(images=pictures, return_tensors="pt")
        assert torch.equal(images.pixel_values, expected["pixel_values"])
        assert torch.equal(images.grid_thw, expected["image_grid_thw"])
        assert ids.count(encoder.token_id) == len(images.slots) == len(images.pixel_values) // 4
        assert all(ids[slot] == encoder.token_id for slot in images.slots)
        assert len(collapsed(ids, images)) == len(ids) - sum(n - 1 for n in images.lengths)
    shown = [tokenizer.decode(collapsed(*one)) for one in zip(prompts.ids, prompts.images, strict=True)]
    one = f"<|vision_start|>{PAD}<|vision_end|>"
    assert shown == [
        f"user: {one}what is it?\nassistant: ",
        f"user: {one}{one}compare them\nassistant: ",
        "user: no picture\nassistant: ",
        f"say {one}",
    ]


def test_positions_are_those_of_the_model(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder).model
    for ids, _, images in answered(folder):
        if images is not None:
            kinds = inputs_of(ids, images)["mm_token_type_ids"]
            expected, _ = model.get_rope_index(ids[None], kinds, image_grid_thw=images.grid_thw)
            assert torch.equal(continued(images.positions, len(ids)).T, expected[:, 0])


def test_images_come_as_pil_bytes_paths_or_dicts_and_upright(tmp_path):
    image = picture(9, 5)
    image.save(tmp_path / "a.png")
    for stored in (image, png(image), str(tmp_path / "a.png"), tmp_path / "a.png", {"bytes": png(image), "path": None}):
        assert open_picture(stored).size == (9, 5)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "lying.jpg", exif=exif)

    class Processor:
        def get_number_of_image_patches(self, height, width, options):
            return 4 * (100 * height + width)

    assert ImageEncoder(Processor(), 0, 2).lengths([tmp_path / "lying.jpg", picture(9, 5)]) == [905, 509]


def test_large_pictures_are_scaled_down_for_trainer_and_engine_alike(folder):
    encoder = replace(ImageEncoder.load(folder), max_pixels=400)
    (length,) = encoder.lengths([picture(80, 20)])
    images = encoder([encoder.token_id] * length, [picture(80, 20)])
    assert images.pictures[0].size == (40, 10)
    assert encoder.lengths([picture(20, 20)]) == ImageEncoder.load(folder).lengths([picture(20, 20)])
    data = PromptDataModule(path="toy_vlm.rows", max_image_pixels=400, tokenizer=folder)
    with pytest.raises(ValueError, match=r"data\.max_image_pixels needs a vision-language model"):
        data.setup("fit")


def test_a_conversation_without_image_parts_gets_them_in_its_first_user_message(folder):
    rows = [
        {
            "prompt": [{"role": "system", "content": "look"}, {"role": "user", "content": "well?"}],
            "image": picture(8, 8),
        }
    ]
    (ids,) = table_of(folder, rows).ids
    text = AutoTokenizer.from_pretrained(folder).decode(ids.tolist())
    assert text == f"system: look\nuser: <|vision_start|>{PAD}<|vision_end|>well?\nassistant: "


def test_keys_that_arrow_fills_up_are_no_images(folder):
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?", "image": None}]
    row = ROWS[0] | {"prompt": [{"role": "user", "content": parts}]}
    assert table_of(folder, [row]).ids == table_of(folder, ROWS[:1]).ids


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ask("?", 2), "images": [picture(8, 8)]}, r"row 1 has 2 image placeholders and 1 images"),
        ({"prompt": ask("?", 1)}, r"row 1 has 1 image placeholders and 0 images"),
        ({"prompt": ask("?", 1), "images": [picture(8, 8)] * 2}, r"row 1 has 1 image placeholders and 2 images"),
        ({"prompt": "plain text", "image": picture(8, 8)}, r"row 1 has 0 image placeholders and 1 images"),
        ({"prompt": ask("?", 1), "image": b"no picture"}, r"row 1 cannot be shown: image 0 is in no format"),
        (
            {"prompt": ask("?", 1), "image": "gone.png"},
            r"row 1 cannot be shown: image 0 cannot be read.*No such file.*gone\.png",
        ),
        ({"prompt": ask("?", 1), "images": [7]}, r"row 1 cannot be shown: image 0 must be a PIL image, .* got int"),
        ({"prompt": ask("?", 1), "image": picture(300, 1)}, r"row 1 cannot be shown: image 0 absolute aspect ratio"),
        ({"prompt": [{"role": "system", "content": "?"}], "image": picture(8, 8)}, r"row 1 has images but no user"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_row(row, message, folder):
    with pytest.raises(ValueError, match=message):
        table_of(folder, [ROWS[0], row])


def test_a_picture_that_breaks_later_is_named_too(folder):
    half = png(picture(40, 40))[:600]
    with pytest.raises(ValueError, match=r"row 0 cannot be shown: image 0 .*truncated"):
        table_of(folder, [{"prompt": ask("?", 1), "image": half}]).take([0])


def test_a_text_model_refuses_images_but_not_texts_in_a_column_of_that_name(folder):
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder))
    for row in ({"prompt": ask("?", 1)}, {"prompt": "?", "images": [picture(8, 8)]}):
        with pytest.raises(ValueError, match=r"row 0 has image.*takes text only"):
            PromptTable.build([row], range(1), encoder)
    prompts = PromptTable.build([{"prompt": "?", "image": "registry/box:1"}], range(1), encoder).take([0])
    assert prompts.images is None
    assert prompts.columns == {"image": ["registry/box:1"]}


def test_vision_language_models_of_other_families_are_refused(folder):
    assert auto_class(AutoConfig.from_pretrained(folder)) is AutoModelForImageTextToText
    assert not is_vision_language(LlamaConfig())
    with pytest.raises(NotImplementedError, match=r"gemma3 is a vision-language model .* qwen2_vl, qwen2_5_vl"):
        is_vision_language(Gemma3Config())


# -- batches -------------------------------------------------------------------------------------------------------------


def test_responses_to_one_prompt_share_its_patches_and_features_go_to_the_piece_that_has_their_slot(folder):
    (a, n, images), (b, m, others), (c, k, _), _ = answered(folder)
    sequences, lengths, shown = [a, b, a, c], [n, m, n, k], [images, others, images, None]
    whole = pack(sequences, lengths, images=shown).images
    assert sum(map(len, whole.pixel_values)) == 4 * (len(images.slots) + len(others.slots))
    assert whole.pixel_values[0] is images.pixel_values
    assert whole.sources.tolist() == [*range(len(images.slots) + len(others.slots)), *range(len(images.slots))]
    pieces = [pack(sequences, lengths, 4, rank, shown) for rank in range(4)]
    size = len(pieces[0].input_ids) // 4
    assert [slot + rank * size for rank, p in enumerate(pieces) for slot in p.images.slots] == whole.slots.tolist()
    assert [source for p in pieces for source in p.images.sources] == whole.sources.tolist()
    assert pack([c], [k]).images is None
    assert pack_images([None], [3], torch.arange(3)) is None


# -- decoding ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[64, 3])
def engine(folder: str, request: pytest.FixtureRequest) -> TransformersEngine:
    engine = TransformersEngine(batch_size=request.param)
    engine.setup(EngineSetup(folder, torch.device("cpu"), torch.float32, (1,), 0, 512, 32))
    engine.weight_version = 0
    return engine


def test_the_engine_decodes_like_stock_generate_whatever_is_beside_a_prompt(engine, folder):
    prompts = table_of(folder, [*ROWS, ROWS[0] | {"images": [picture(20, 30, 9)]}]).take(range(5))
    assert prompts.ids[0] == prompts.ids[4], "equal tokens, another picture"
    sampling = Sampling(temperature=0.0, max_completion_length=12, ignore_eos=True)
    twice = [i for i in range(5) for _ in range(2)]
    out = engine.generate(
        [prompts.ids[i] for i in twice],
        sampling,
        seeds=[0] * 10,
        log_probs=True,
        images=[prompts.images[i] for i in twice],
    )
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    for i in range(5):
        ids, images = torch.tensor(prompts.ids[i]), prompts.images[i]
        shown = inputs_of(ids, images)
        stock = model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            **shown,
        )
        assert out[2 * i].token_ids == out[2 * i + 1].token_ids == stock[0, len(ids) :].tolist()
        full = torch.cat([ids, torch.tensor(out[2 * i].token_ids)])
        logits = model(full[None], **inputs_of(full, images)).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, full[len(ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out[2 * i].log_probs), expected, atol=2e-5, rtol=1e-4)
    assert out[0].token_ids != out[8].token_ids, "the picture matters"


def test_a_common_beginning_ends_at_the_first_picture(engine, folder):
    text = "a long beginning that all prompts have in common " * 3
    rows = [
        {"prompt": [{"role": "system", "content": text}, *ask("?", 1)], "image": picture(20, 30, s)} for s in (1, 2)
    ]
    prompts = table_of(folder, rows).take(range(2))
    sampling = Sampling(max_completion_length=6, ignore_eos=True)
    together = engine.generate(prompts.ids, sampling, seeds=[1, 2], log_probs=True, images=prompts.images)
    for i, completion in enumerate(together):
        (alone,) = engine.generate(
            prompts.ids[i : i + 1], sampling, seeds=[i + 1], log_probs=True, images=prompts.images[i : i + 1]
        )
        assert alone.token_ids == completion.token_ids
        torch.testing.assert_close(
            torch.tensor(alone.log_probs), torch.tensor(completion.log_probs), atol=2e-5, rtol=1e-4
        )
