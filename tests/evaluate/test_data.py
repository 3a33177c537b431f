import pytest

from quantmla.errors import TextError
from quantmla.evaluate.data import ITEM_SLICES, open_items


@pytest.mark.parametrize("name", ITEM_SLICES)
def test_item_slices_have_sixty_items_of_their_task(name):
    items = open_items(name).items
    assert len(items) == 60
    assert {item["task"] for item in items} == {name}


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 2"), ("[1]", "line 2"), ("", "no items")]
)
def test_broken_task_files_name_the_line(tmp_path, line, message):
    first = "\n" if line == "" else '{"id": 1}\n'
    (tmp_path / "items").write_text(first + line)
    with pytest.raises(TextError, match=message):
        open_items(tmp_path / "items")
