"""The tables of docs/baselines.md against the formats and methods of the code."""

import re
from pathlib import Path

from quantmla.ablate.cells import SCHEMES
from quantmla.ablate.forms import SIMULATED, form_of
from quantmla.calibrate.methods import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text(encoding="utf-8")


def test_bytes_and_storage_of_every_format():
    row = re.compile(
        r"^\| `([\w-]+)` \|.*\| (\d+) \| (\d+) \| (packed|simulated) \|$", re.MULTILINE
    )
    stated = {name: (int(own), int(large), kind) for name, own, large, kind in row.findall(PAGE)}
    assert list(stated) == [*SCHEMES, *SIMULATED]
    for name, (own, large, kind) in stated.items():
        form = form_of(name)
        assert (form.logical_bytes(256, 64), form.logical_bytes(512, 64)) == (own, large), name
        assert form.packed == (kind == "packed")


def test_every_method_has_a_row():
    part = PAGE.split("## Methods")[1].split("## The ladder")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == set(METHODS)
