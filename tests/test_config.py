"""Schemes, recipes and the quantmla block: what is accepted, what is refused and how."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quantmla.config import (
    BITS,
    KVScheme,
    LayerBits,
    PathFormat,
    QuantMLABlock,
    Recipe,
    TrainConfig,
)
from quantmla.errors import SchemeError

BLOCK = {
    "method": "quantmla",
    "content": {"bits": 4, "group": 64},
    "rope": {"bits": 4, "group": 64},
    "rope_pairing": "interleaved",
    "rope_pairing_cache": "half",
}


@pytest.mark.parametrize("content", BITS)
@pytest.mark.parametrize("rope", BITS)
def test_names_round_trip(content, rope):
    scheme = KVScheme(content_bits=content, rope_bits=rope)
    assert scheme.name == f"c{content}r{rope}"
    for spelling in (
        scheme.name,
        f"C{content}R{rope}",
        f"c{content}-r{rope}",
        f"C{content}_r{rope}",
    ):
        assert KVScheme.parse(spelling) == scheme


def test_defaults_are_the_papers_policy():
    scheme = KVScheme.parse("c2r4")
    assert (scheme.group, scheme.zero) == (64, "zp8")
    assert (scheme.sink_tokens, scheme.window_tokens) == (4, 128)
    assert KVScheme.parse("c4r4", zero="min16", window_tokens=0).window_tokens == 0


@pytest.mark.parametrize("name", ["c5r4", "c4", "r4c4", "", "c4r4x", "k4v4", "c0r4", None, 4])
def test_unknown_names_list_the_valid_ones(name):
    with pytest.raises(SchemeError, match="1, 2, 3, 4, 8, 16"):
        KVScheme.parse(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("content_bits", 5),
        ("content_bits", True),
        ("rope_bits", "4"),
        ("group", 12),
        ("group", 0),
        ("zero", "zp4"),
        ("sink_tokens", -1),
        ("window_tokens", 1.0),
        ("block", 64),
    ],
)
def test_a_wrong_field_of_a_scheme_is_named(field, value):
    with pytest.raises(SchemeError, match=rf"KVScheme\.{field}"):
        KVScheme(**{"content_bits": 4, "rope_bits": 4, field: value})


@pytest.mark.parametrize("field", ["k_bits", "v_bits"])
@pytest.mark.parametrize("inside", [False, True])
def test_key_and_value_bits_point_to_the_two_paths(field, inside):
    scheme = {"content_bits": 4, "rope_bits": 4}
    recipe = {"scheme": scheme | {field: 4}} if inside else {"scheme": scheme, field: 4}
    for build in (lambda: Recipe(**recipe), lambda: KVScheme(**{field: 4})):
        with pytest.raises(SchemeError, match="content_bits and rope_bits") as caught:
            build()
        assert field in caught.value.where


def test_models_are_immutable():
    with pytest.raises(ValidationError, match="frozen"):
        KVScheme.parse("c4r4").group = 32


def test_recipe_defaults_and_yaml_round_trip(tmp_path):
    recipe = Recipe(scheme="c2r4", clip_content="learned", clip_rope=0.65, train={"lr_angle": 0.1})
    assert (recipe.sequences, recipe.heldout_sequences, recipe.sequence_tokens) == (128, 32, 2048)
    assert (recipe.steps, recipe.method, recipe.train) == (
        300,
        "quantmla",
        TrainConfig(lr_angle=0.1),
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert Recipe.from_yaml(path) == recipe
    assert Recipe.from_yaml(path).sha256() == recipe.sha256()
    path.write_text("scheme: c2r4\nclip_content: learned\n", encoding="utf-8")
    assert Recipe.from_yaml(str(path)).scheme == KVScheme.parse("c2r4")


def test_recipe_hash_is_of_the_values():
    base = Recipe(scheme="c4r4")
    assert base.sha256() == Recipe(scheme={"content_bits": 4, "rope_bits": 4}, seed=0).sha256()
    others = [
        Recipe(scheme="c4r4", seed=1),
        Recipe(scheme="c4r4", clip_content=0.5),
        Recipe(scheme="c4r4", train={"warmup_steps": 0}),
    ]
    assert len({recipe.sha256() for recipe in [base, *others]}) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "quarot"),
        ("clip_content", 0.0),
        ("clip_rope", 1.5),
        ("clip_rope", "learn"),
        ("sequences", 0),
        ("sequence_tokens", 1),
        ("steps", -1),
        ("seed", 2.0),
        ("protect", "all"),
        ("train", {"lr": 1.0}),
        ("scheme", "c9r9"),
        ("stepz", 3),
    ],
)
def test_a_wrong_field_of_a_recipe_is_a_scheme_error(field, value):
    with pytest.raises(SchemeError):
        Recipe(**{"scheme": "c4r4", field: value})


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"a: [1",
        b"- 1\n- 2\n",
        b"",
        b"# " + b"x" * (1 << 20),
        b"scheme: !!python/x",
    ],
)
def test_bad_recipe_files(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(SchemeError, match=r"recipe\.yaml"):
        Recipe.from_yaml(path)


def test_absent_recipe_file(tmp_path):
    with pytest.raises(SchemeError, match="FileNotFoundError"):
        Recipe.from_yaml(tmp_path / "none.yaml")


def test_block_round_trips_through_json():
    block = QuantMLABlock(
        **BLOCK,
        rope_online="hadamard",
        clip=True,
        per_layer={"3": LayerBits(content_bits=8), "4": {"rope_bits": 16}},
        recipe_sha256="0" * 64,
        fingerprint="a" * 64,
    )
    config = {"model_type": "deepseek_v3", "quantmla": json.loads(json.dumps(block.to_config()))}
    assert QuantMLABlock.from_config(config) == block
    assert [block.scheme(layer).name for layer in (0, 3, 4)] == ["c4r4", "c8r4", "c4r16"]
    assert block.scheme(3).window_tokens == 128


def test_block_is_read_from_a_transformers_config():
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(quantmla=BLOCK)
    assert QuantMLABlock.from_config(config).content == PathFormat(bits=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 3}, "format version"),
        ({"format": 3, "unheard_of": 1}, "format version"),
        ({"layout": 1}, "layout version"),
        ({"layout": 7}, "layout version"),
        ({"rope": {"bits": 4, "group": 32}}, "one group size"),
        ({"per_layer": {"x": {}}}, "per_layer"),
        ({"per_layer": {"01": {}}}, "per_layer"),
        ({"rope_pairing": "split"}, "rope_pairing"),
        ({"fingerprint": "abc"}, "fingerprint"),
        ({"k_bits": 4}, "content_bits"),
        ({"content": 4}, "PathFormat"),
    ],
)
def test_bad_blocks(change, words):
    with pytest.raises(SchemeError, match=words):
        QuantMLABlock.from_config({"quantmla": {**BLOCK, **change}})


@pytest.mark.parametrize("config", [{}, {"quantmla": None}, {"quantmla": [1]}])
def test_no_block(config):
    with pytest.raises(SchemeError, match="no quantmla block"):
        QuantMLABlock.from_config(config)


@given(st.dictionaries(st.sampled_from([*KVScheme.model_fields, "x"]), st.integers() | st.text()))
def test_any_scheme_mapping_is_a_scheme_or_a_scheme_error(data):
    try:
        scheme = KVScheme(**data)
    except SchemeError:
        return
    assert scheme.content_bits in BITS
    assert scheme.rope_bits in BITS
