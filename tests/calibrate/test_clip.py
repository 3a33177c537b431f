"""Grid search of clip ratios: it finds what an exhaustive search on the real error finds."""

import pytest
import torch

from quantmla.calibrate.capture import capture_layers
from quantmla.calibrate.clip import RATIOS, with_clips
from quantmla.calibrate.objective import LayerAttention
from quantmla.calibrate.readback import read_content, read_rope
from quantmla.calibrate.workspace import LayerWorkspace
from quantmla.config import Recipe
from quantmla.transform.content import random_hadamard
from quantmla.transform.layer import LayerTransform
from tiny import write_tiny

WINDOWS = torch.randint(0, 96, (3, 48), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), layers=1, kv_lora_rank=64, hidden_size=64)
    return next(capture_layers(folder, WINDOWS))


def recipe(scheme, group=16, **clips):
    scheme = {"content_bits": int(scheme[1]), "rope_bits": int(scheme[3]), "group": group}
    return Recipe(
        method="rtn",
        scheme=scheme,
        sequences=2,
        heldout_sequences=1,
        protect="none",
        **clips,
    )


def content_error(capture, transform, recipe):
    attention = LayerAttention(capture)
    total = 0.0
    for index in range(3):
        unit = attention.sequence(index)[0]
        back = read_content(transform, recipe.scheme, capture.gamma, unit)
        total += float(attention.error(index, latent_unit=back)[0])
    return total


@pytest.mark.parametrize("rotated", [False, True])
def test_content_search_comes_close_to_the_best_common_ratio(capture, rotated):
    start = LayerTransform(content_rotation=random_hadamard(64, 1) if rotated else None)
    learned = recipe("c2r4", clip_content="learned")
    found = with_clips(start, LayerWorkspace(capture, "half", 0), learned)
    assert found.content_clip.shape == (4,)
    assert found.rope_clip is None
    assert set(found.content_clip.tolist()) <= set(torch.tensor(RATIOS).tolist())
    by_ratio = {
        ratio: content_error(
            capture,
            with_clips(
                start, LayerWorkspace(capture, "half", 0), recipe("c2r4", clip_content=ratio)
            ),
            learned,
        )
        for ratio in RATIOS
    }
    assert min(by_ratio, key=by_ratio.get) < 1
    assert content_error(capture, found, learned) < 1.05 * min(by_ratio.values())
    assert content_error(capture, found, learned) < 0.95 * by_ratio[1.0]


def test_rope_search_beats_every_common_ratio(capture):
    learned = recipe("c4r2", group=8, clip_rope="learned")
    found = with_clips(LayerTransform(), LayerWorkspace(capture, "half", 0), learned)
    assert found.content_clip is None

    def score_error(transform):
        back = read_rope(transform, learned.scheme, "half", capture.k_rope[:2])
        scores = capture.q_rope[:2] @ (back - capture.k_rope[:2])[:, None].mT
        return float(scores.tril().square().sum())

    best = score_error(found)
    for ratio in RATIOS:
        trial = recipe("c4r2", group=8, clip_rope=ratio)
        assert (
            best
            <= score_error(with_clips(LayerTransform(), LayerWorkspace(capture, "half", 0), trial))
            * 1.0001
        )


def test_no_clip_for_16_bits_or_without_a_request(capture):
    wide = Recipe(method="rtn", scheme="c16r4", clip_content=0.7, clip_rope=0.8)
    found = with_clips(LayerTransform(), LayerWorkspace(capture, "half", 0), wide)
    assert found.content_clip is None
    assert torch.allclose(found.rope_clip, torch.tensor([0.8]))
    plain = with_clips(LayerTransform(), LayerWorkspace(capture, "half", 0), recipe("c2r2"))
    assert plain.content_clip is plain.rope_clip is None


def test_search_repeats_for_a_seed(capture):
    learned = recipe("c2r2", clip_content="learned", clip_rope="learned")
    one, two = (
        with_clips(LayerTransform(), LayerWorkspace(capture, "half", 3), learned) for _ in range(2)
    )
    assert torch.equal(one.content_clip, two.content_clip)
    assert torch.equal(one.rope_clip, two.rope_clip)
