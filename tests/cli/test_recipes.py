import pytest

from quantmla.cli.recipes import build_recipe, change_recipe, parse_setting
from quantmla.config import KVScheme, Recipe
from quantmla.errors import SchemeError


def test_defaults_file_options_and_settings_in_that_order(tmp_path):
    assert build_recipe(None, []) == Recipe(scheme=KVScheme.parse("c4r4"))
    file = tmp_path / "r.yaml"
    file.write_text("scheme: c2r4\nsteps: 5\nseed: 3\nclip_content: learned\n")
    recipe = build_recipe(file, ["steps=7", "train.lr_angle=3e-4"], seed=4, method=None)
    assert (recipe.scheme.name, recipe.steps, recipe.seed) == ("c2r4", 7, 4)
    assert (recipe.method, recipe.clip_content) == ("quantmla", "learned")
    assert recipe.train.lr_angle == 3e-4


def test_a_scheme_name_keeps_the_other_settings_of_the_scheme():
    recipe = build_recipe(None, ["scheme.window_tokens=0", "scheme=c3r4"])
    assert recipe.scheme == KVScheme(content_bits=3, rope_bits=4, window_tokens=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps=1", ("steps", 1)),
        ("clip-content=0.65", ("clip_content", 0.65)),
        ("clip_rope=null", ("clip_rope", None)),
        ("train.lr_clip=5e-2", ("train.lr_clip", 0.05)),
        ("method=rtn", ("method", "rtn")),
    ],
)
def test_values_are_read_as_yaml(text, expected):
    assert parse_setting(text) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "key=value"),
        ("=3", "key=value"),
        ("steps=[", "cannot be read"),
        ("steps=many", "Recipe.steps"),
        ("nothing=1", "Recipe.nothing"),
        ("nothing.deep=1", "no parts"),
        ("steps.deep=1", "no parts"),
        ("scheme.k_bits=4", "content_bits"),
        ("scheme=k4v4", "c<bits>r<bits>"),
    ],
)
def test_settings_that_do_not_fit_are_named(setting, message):
    with pytest.raises(SchemeError, match=message):
        build_recipe(None, [setting])


def test_change_recipe_touches_only_what_is_named(tmp_path):
    base = {"steps": 60, "sequences": 24}
    file = tmp_path / "r.yaml"
    file.write_text("scheme: c4r4\nsteps: 5\n")
    changed = change_recipe(base, file, ["train.warmup_steps=2", "seed=1"])
    assert base == {"steps": 60, "sequences": 24}
    assert changed.pop("scheme")["content_bits"] == 4
    assert changed == {"steps": 5, "sequences": 24, "seed": 1, "train": {"warmup_steps": 2}}


def test_a_method_brings_its_own_defaults_and_takes_them_away(tmp_path):
    plus = build_recipe(None, [], method="quantmla_plus", scheme="c2r4")
    assert plus == Recipe(method="quantmla_plus", scheme=KVScheme.parse("c2r4"))
    assert (plus.dither, plus.rope_feedback, plus.clip_rope) == (True, True, "learned")
    assert build_recipe(None, ["method=quantmla_plus"]).content_shift
    partly = build_recipe(None, ["rope_feedback=false"], method="quantmla_plus")
    assert (partly.rope_shift, partly.rope_feedback) == (True, False)
    file = tmp_path / "plus.yaml"
    file.write_text("method: quantmla_plus\nscheme: c4r4\nclip_rope: 0.9\n", encoding="utf-8")
    plain = build_recipe(file, [], method="quantmla")
    assert not any((plain.dither, plain.rope_shift, plain.rope_feedback))
    assert (plain.clip_content, plain.clip_rope) == (None, 0.9)
