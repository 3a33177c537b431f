"""Requests that leave the paged cache and come back: host copies and files."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paged_rows import FINGERPRINT, LAYOUTS, ROWS, append, blobs_of, check_tokens, layout_of, paged
from quantmla.cache import saved
from quantmla.errors import CacheError

LENGTHS = [0, 1, 7, 10, 11, 63, 64, 65, 130]
OTHER = (LAYOUTS[0], layout_of("c4r16", rank=24))


def filled(**settings):
    """Three requests; the second and third share pages."""
    cache = paged(**settings)
    for request, tokens in (("a", 130), (7, 70)):
        cache.add(request)
        append(cache, request, list(range(tokens)))
    cache.fork(7, "fork")
    append(cache, "fork", [300])
    return cache


def check_filled(cache):
    check_tokens(cache, "a", list(range(130)))
    check_tokens(cache, 7, list(range(70)))
    check_tokens(cache, "fork", [*range(70), 300])


@pytest.mark.parametrize("length", LENGTHS)
def test_offload_and_restore_bring_back_every_component(length):
    # field report FR-055
    cache = paged(n_pages=4, n_slots=2)
    cache.add("a")
    append(cache, "a", list(range(length)))
    copy = cache.offload("a")
    assert "a" not in cache
    assert (cache.free_pages, len(cache.free_slots)) == (4, 2)
    assert copy.nbytes == sum(x.nbytes for x in (*copy.pages, *copy.rows))
    cache.add("other")
    append(cache, "other", list(range(399, 259, -1)))  # what the pages and the slot hold meanwhile
    cache.free("other")
    cache.add("first")
    append(cache, "first", [5])
    cache.restore("back", copy)
    check_tokens(cache, "back", list(range(length)))
    append(cache, "back", [350, 351])
    check_tokens(cache, "back", [*range(length), 350, 351])
    check_tokens(cache, "first", [5])


def test_a_copy_keeps_the_limits_of_roll_back_and_fits_other_page_sizes():
    cache = paged()
    cache.add("a")
    append(cache, "a", list(range(100)))
    cache.truncate("a", 98)
    copy, other = cache.offload("a"), paged(page_tokens=128)
    other.restore("a", copy)
    with pytest.raises(CacheError, match="were overwritten"):
        other.truncate("a", 95)
    other.truncate("a", 96)
    append(other, "a", [200, 201])
    check_tokens(other, "a", [*range(96), 200, 201])


def test_nothing_of_an_earlier_owner_leaves_the_pool(tmp_path):
    cache = paged()
    cache.add("a")
    append(cache, "a", list(range(70)))
    copy = cache.offload("a")
    for layout, pages in zip(LAYOUTS, copy.pages, strict=True):
        plane = layout.plane("scale")
        part = pages[1, plane.offset_bytes : plane.end_bytes].view(plane.entries, 64, 2)
        assert (part[:, 6:] == 0).all()
        assert (part[:, :6] != 0).any()
        assert (pages[:, layout.payload_bytes :] == 0).all()
    files = []
    for fill in (0xFF, 0x11):
        cache = paged()
        for layer in range(2):
            cache.pool(layer)[0].fill_(fill)
        cache.add("a")
        append(cache, "a", list(range(70)))
        cache.save(tmp_path / "saved")
        files.append((tmp_path / "saved").read_bytes())
    assert files[0] == files[1]


def bad_copies():
    cache = paged()
    cache.add("a")
    append(cache, "a", list(range(70)))
    copy = cache.offload("a")
    return {
        "fingerprint": replace(copy, fingerprint="b" * 64),
        "no rows": replace(copy, rows=()),
        "a layer less": replace(copy, pages=copy.pages[:1]),
        "pages cut": replace(copy, pages=tuple(x[:1] for x in copy.pages)),
        "rows cut": replace(copy, rows=tuple(x[1:] for x in copy.rows)),
        "rows as float": replace(copy, rows=tuple(x.float() for x in copy.rows)),
        "length": replace(copy, tokens=200),
    }


@pytest.mark.parametrize("case", bad_copies())
def test_copies_that_do_not_fit_are_refused(case):
    cache = paged()
    with pytest.raises(CacheError) as error:
        cache.restore("a", bad_copies()[case])
    words = {"fingerprint": "a" * 64}.get(case, "pages and rows of 2 layers")
    assert words in str(error.value)
    assert (cache.free_pages, len(cache.free_slots), "a" in cache) == (8, 4, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layouts": OTHER}, "expected: layers "),
        ({"slack_tokens": 4}, "expected: slack_tokens 4"),
        ({"fingerprint": "b" * 64}, f"got: fingerprint {FINGERPRINT}"),
        ({"n_pages": 1}, "2 pages needed, 1 in the pool"),
        ({"n_slots": 1}, "1 of 1 slots needed"),
    ],
)
def test_restore_where_it_does_not_fit_changes_nothing(settings, words):
    source, cache = filled(), paged(**settings)
    if "n_slots" in settings:
        cache.add("x")
    before = cache.free_pages
    with pytest.raises(CacheError) as error:
        cache.restore("new", source.offload(7))
    assert words in str(error.value)
    assert (cache.free_pages, "new" in cache) == (before, False)


@pytest.mark.parametrize("page_tokens", [64, 128])
def test_save_and_load_all_components(tmp_path, page_tokens):
    path = tmp_path / "cache.safetensors"
    filled(page_tokens=page_tokens).save(path)
    cache = paged(page_tokens=page_tokens)
    cache.add("here")
    append(cache, "here", [1, 2, 3])
    assert cache.load(path) == {"a": 130, 7: 70, "fork": 71}
    check_filled(cache)
    check_tokens(cache, "here", [1, 2, 3])
    pages = {int(b) * 64 // page_tokens for x in ("a", 7, "fork") for b in blobs_of(cache, x)}
    assert cache.free_pages == 8 - 1 - len(pages)  # forks share again
    append(cache, 7, [310])
    append(cache, "fork", [320, 321])
    check_tokens(cache, 7, [*range(70), 310])
    check_tokens(cache, "fork", [*range(70), 300, 320, 321])
    for request in ("a", 7, "fork", "here"):
        cache.free(request)
    assert (cache.free_pages, sorted(cache.free_slots)) == (8, [0, 1, 2, 3])
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]


def test_the_file_is_as_documented(tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = filled()
    cache.save(path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata().keys() == {"quantmla_cache"}
        meta = json.loads(file.metadata()["quantmla_cache"])
    names = ["tables", *(f"layers.{i}.{kind}" for i in (0, 1) for kind in ("pages", "rows"))]
    assert sorted(tensors) == sorted(names)
    assert tensors["tables"].tolist() == [0, 1, 2, 3, 4, 3, 5]
    assert [tuple(tensors[name].shape) for name in names[1:]] == [
        (6, LAYOUTS[0].page_bytes),
        (30, 24),
        (6, LAYOUTS[1].page_bytes),
        (30, 32),
    ]
    assert torch.equal(tensors["layers.1.rows"][10], ROWS[1].rows[0])
    assert meta["requests"][0] == {"id": "a", "tokens": 130, "intact_from": 122}
    assert (meta["format"], meta["page_tokens"]) == (1, 64)
    assert (meta["geometry"]["layout"], meta["geometry"]["slack_tokens"]) == (2, 3)
    expected = meta.pop("sha256")
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in names:
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy())
    assert digest.hexdigest() == expected


def test_pieces_of_a_file_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "cache.safetensors"
    cache = filled()
    cache.save(path)
    whole = path.read_bytes()
    monkeypatch.setattr(saved, "CHUNK_BYTES", 2 * LAYOUTS[0].page_bytes)
    cache.save(path)
    assert path.read_bytes() == whole
    other = paged()
    other.load(path)
    check_filled(other)


def test_an_empty_cache_and_empty_requests_are_saved(tmp_path):
    path, cache = tmp_path / "saved", paged()
    cache.save(path)
    assert paged().load(path) == {}
    cache.add("empty")
    cache.save(path)
    other = paged()
    assert other.load(path) == {"empty": 0}
    append(other, "empty", [3])
    check_tokens(other, "empty", [3])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fingerprint": "b" * 64}, ["b" * 64, FINGERPRINT]),  # field report FR-053
        ({"layouts": OTHER}, ["expected: layers"]),
        ({"slack_tokens": 0}, ["expected: slack_tokens 0", "got: slack_tokens 3"]),
        ({"page_tokens": 128}, ["another page_tokens", "got: page_tokens 64"]),
        ({"n_pages": 5}, ["6 pages needed, 5 in the pool"]),
        ({"n_pages": 2}, ["expected: at most 128 tokens in 2 pages"]),
        ({"n_slots": 2}, ["3 of 2 slots needed"]),
    ],
)
def test_load_where_it_does_not_fit_changes_nothing(tmp_path, settings, words):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    cache = paged(**settings)
    free = (cache.free_pages, len(cache.free_slots))
    with pytest.raises(CacheError) as error:
        cache.load(path)
    assert all(word in str(error.value) for word in words)
    assert (cache.free_pages, len(cache.free_slots), cache.states) == (*free, {})


def test_load_refuses_ids_in_use(tmp_path):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    cache = paged()
    cache.add("a")
    append(cache, "a", [9])
    with pytest.raises(CacheError, match="already in the cache"):
        cache.load(path)
    check_tokens(cache, "a", [9])
    assert cache.free_pages == 7


def test_damaged_files_are_refused_and_leave_the_cache_alone(tmp_path):
    # field report FR-054
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    good = path.read_bytes()
    cache = paged()
    cache.add("x")
    append(cache, "x", list(range(20, 90)))

    def refused(data):
        path.write_bytes(data)
        with pytest.raises(CacheError):
            cache.load(path)
        check_tokens(cache, "x", list(range(20, 90)))
        assert cache.free_pages == 6

    for size in (0, 5, 8, 100, len(good) // 2, len(good) - 1):
        refused(good[:size])
    refused(good + b"\0")
    for place in range(3, len(good), len(good) // 60):
        if good[place : place + 1] != b" ":  # padding of the header has no meaning
            refused(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
    for old, new in (
        (b'\\"tokens\\": 130', b'\\"tokens\\": 129'),
        (b'\\"tokens\\": 130', b'\\"tokens\\": -30'),
        (b'\\"tokens\\": 130', b'\\"tokens\\": 1.0'),
        (b'\\"intact_from\\": 122', b'\\"intact_from\\": 131'),
        (b'\\"intact_from\\": 122', b'\\"intact_from\\": 1  '),
        (b'\\"id\\": \\"a\\"', b'\\"id\\": null '),
        (b'\\"id\\": \\"a\\"', b'\\"id\\": 7     '),
        (b'\\"format\\": 1', b'\\"format\\": 2'),
    ):
        assert good.count(old) == 1
        refused(good.replace(old, new))
    path.unlink()
    with pytest.raises(CacheError, match="cannot be read"):
        cache.load(path)
    path.write_bytes(good)
    cache.load(path)
    check_filled(cache)


def test_sizes_are_bounded_before_memory_is_taken(tmp_path, monkeypatch):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    good, cache = path.read_bytes(), paged()
    monkeypatch.setattr(saved, "_read_data", lambda *_: pytest.fail("read before it was checked"))
    rows, pages = b'"shape": [30, 32]', str(LAYOUTS[1].page_bytes).encode()
    for old, new in (
        (rows, b'"shape": [32, 30]'),
        (rows, b'"shape": [15, 64]'),
        (b'"shape": [6, ' + pages, b'"shape": [' + pages + b", 6"),
        (b'"dtype": "U8"', b'"dtype": "I8"'),
        (b'"dtype": "BF16"', b'"dtype": "I16" '),
    ):
        assert old in good
        path.write_bytes(good.replace(old, new))
        with pytest.raises(CacheError, match="cannot be read") as error:
            cache.load(path)
        assert "ValueError: layers." in str(error.value)
    huge = good.replace(b'\\"tokens\\": 130', b'\\"tokens\\": 9' + b"9" * 30)
    path.write_bytes(huge)
    with pytest.raises(CacheError, match="cannot be read"):
        cache.load(path)


@pytest.mark.parametrize("request_id", [("a", 1), None, True, 1.5, b"a"])
def test_ids_that_no_file_can_hold(tmp_path, request_id):
    cache = paged()
    cache.add(request_id)
    append(cache, request_id, [1])
    with pytest.raises(CacheError, match="text or int"):
        cache.save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path, cache = tmp_path / "saved", filled()
    cache.save(path)
    good = path.read_bytes()

    def full(tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "_bytes_of", full)
    with pytest.raises(CacheError, match="cannot be saved"):
        cache.save(path)
    assert path.read_bytes() == good
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(CacheError, match="cannot be saved"):
        cache.save(tmp_path / "no folder" / "saved")
