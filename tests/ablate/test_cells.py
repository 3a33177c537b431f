"""Cells: their names, the square of every scheme, and what a format costs."""

import pytest

from quantmla.ablate.cells import SCHEMES, Cell, all_cells, select
from quantmla.ablate.forms import SIMULATED, behind_matrices, form_of
from quantmla.calibrate.methods import METHODS
from quantmla.errors import EvaluationError
from quantmla.quant.codec import Affine
from quantmla.quant.online import Online
from quantmla.transform.content import random_hadamard
from quantmla.transform.layer import LayerTransform


def test_every_scheme_has_its_square_under_both_policies():
    names = {cell.name for cell in all_cells()}
    assert len(names) == len(all_cells())
    for scheme in SCHEMES[:-1]:
        for method in ("rtn", "rtn+quantmla", "quantmla+rtn", "quantmla", "quarot_online"):
            assert {f"{scheme}/{method}/policy", f"{scheme}/{method}/bare"} <= names
    at_16 = {name for name in names if name.startswith("c4r16/") and name.endswith("/policy")}
    assert {"c4r16/rtn/policy", "c4r16/quantmla+rtn/policy"} < at_16
    assert not any("+quantmla" in name or "/quantmla/" in name for name in at_16)
    assert {cell.form for cell in all_cells()} == {*SCHEMES, *SIMULATED}
    methods = {method for cell in all_cells() for method in (cell.content, cell.rope)}
    assert methods == set(METHODS)


def test_only_squares_of_schemes_are_core():
    core = {cell.name for cell in all_cells() if cell.core and cell.form == "c4r4" and cell.policy}
    assert core == {f"c4r4/{m}/policy" for m in ("rtn", "rtn+quantmla", "quantmla+rtn", "quantmla")}
    assert not any(cell.core for cell in all_cells() if cell.form in SIMULATED)


def test_select():
    assert [cell.name for cell in select(["c4r4/rtn/policy"])] == ["c4r4/rtn/policy"]
    assert select([]) == all_cells()
    with pytest.raises(EvaluationError, match="no cell"):
        select(["c4r4/rtn/policy", "c4r4/nonsense/*"])


@pytest.mark.parametrize(
    ("name", "own", "large"),
    [
        ("c4r4", 175, 315),
        ("c2r4", 111, 187),
        ("c4r16", 268, 408),
        ("c4-kivi4", 176, 316),
        ("hqq4", 180, 324),
        ("fp8", 320, 576),
        ("fp8-r16", 384, 640),
        ("fp8-tile", 392, 656),
        ("nvfp4", 180, 324),
        ("nvfp4-r16", 272, 416),
        ("mxfp4", 170, 306),
        ("book4", 164, 292),
        ("norm4-r4", 163, 291),
        ("norm2-r4", 99, 163),
    ],
)
def test_bytes_of_formats(name, own, large):
    form = form_of(name)
    assert (form.logical_bytes(256, 64), form.logical_bytes(512, 64)) == (own, large)
    assert form.packed == (name not in SIMULATED)


def test_unknown_formats_are_refused():
    with pytest.raises(EvaluationError, match="format is not known"):
        Cell("c5r4", "rtn", "rtn").format.logical_bytes(256, 64)


def test_clips_go_to_affine_codecs_and_matrices_around_all():
    clip = object()
    content, rope = form_of("c2-kivi4").codecs(LayerTransform(content_clip=clip, rope_clip=clip))
    assert isinstance(content, Affine)
    assert (content.bits, content.clip, rope.name) == (2, clip, "kivi4")
    matrix = random_hadamard(64, 0)
    wrapped = behind_matrices((content, rope), LayerTransform(rope_matrix=matrix))
    assert wrapped[0] is content
    assert isinstance(wrapped[1], Online)
    assert wrapped[1].matrix is matrix
