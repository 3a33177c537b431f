"""All requests of a paged cache in one safetensors file (docs/layout.md section 6).

Pages that forks share are stored once. The digest covers lengths, ids and every byte of data, and
is compared before a request of the file becomes visible.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from quantmla.cache.hostcopy import check_origin
from quantmla.cache.layout import PAGE_TOKENS
from quantmla.cache.pages import RequestState
from quantmla.cache.pools import LatentPools
from quantmla.errors import CacheError
from quantmla.files import CHUNK_BYTES, atomic_file

if TYPE_CHECKING:
    from quantmla.cache.paged import PagedLatentCache

FILE_VERSION = 1
DTYPES = {torch.uint8: "U8", torch.int32: "I32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Contents:
    """The requests of a file, and which blob of it is which.

    Fields:
        states: slots and pages are those of the cache.
        pages: pages that are stored, in the order of the file.
        blobs: rows of the pool that are stored, in the order of the file.
        used_tokens: tokens in each of them.
    """

    states: list[RequestState]
    pages: list[int]
    blobs: list[int]
    used_tokens: list[int]

    @classmethod
    def of(cls, pools: LatentPools, states: list[RequestState]) -> _Contents:
        used: dict[int, int] = {}
        for state in states:
            for i, page in enumerate(state.pages):
                tokens = min(pools.page_tokens, state.tokens - i * pools.page_tokens)
                used[page] = max(used.get(page, 0), tokens)
        blobs, used_tokens = [], []
        for page, tokens in used.items():
            blobs += pools.blobs([page], tokens)
            used_tokens += [min(PAGE_TOKENS, tokens - n) for n in range(0, tokens, PAGE_TOKENS)]
        return cls(states, list(used), blobs, used_tokens)

    def tensors(self, pools: LatentPools) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of every tensor of the file, in its order."""
        n_rows = sum(pools.used_rows(state.tokens) for state in self.states)
        tensors = {"tables": (torch.int32, (sum(len(s.pages) for s in self.states),))}
        for layer, (pages, rows) in enumerate(zip(pools.pages, pools.rows, strict=True)):
            tensors[f"layers.{layer}.pages"] = (pages.dtype, (len(self.blobs), pages.shape[1]))
            tensors[f"layers.{layer}.rows"] = (rows.dtype, (n_rows, rows.shape[2]))
        return tensors


def save_requests(cache: PagedLatentCache, path: str | Path) -> None:
    """Write all requests of a cache to a file.

    Args:
        cache: its requests are not changed.
        path: target.
    Raises: CacheError if an id cannot be written, or the file system refuses.
    Source: safetensors format.
    """
    for request in cache.states:
        if type(request) not in (str, int):
            raise CacheError(
                "the id of a request cannot be written to a file",
                where="PagedLatentCache.save",
                expected="text or int",
                got=repr(request),
                next_step="add the requests with such ids",
            )
    contents = _Contents.of(cache.pools, list(cache.states.values()))
    requests = [
        {"id": request, "tokens": state.tokens, "intact_from": state.intact_from}
        for request, state in cache.states.items()
    ]
    meta = {
        "format": FILE_VERSION,
        "fingerprint": cache.fingerprint,
        "geometry": cache.pools.geometry(),
        "page_tokens": cache.pools.page_tokens,
        "requests": requests,
    }
    tensors = contents.tensors(cache.pools)
    digest = _digest_of(meta)
    try:
        with atomic_file(path) as file:
            _write_header(file, meta, "0" * 64, tensors)
            for part in _parts(cache.pools, contents):
                data = _bytes_of(part)
                digest.update(data)
                file.write(data)
            file.seek(0)
            _write_header(file, meta, digest.hexdigest(), tensors)
    except OSError as error:
        raise CacheError(
            "the cache cannot be saved",
            where=error.filename or path,
            got=error.strerror or error,
            next_step="free some space, or choose another folder",
        ) from error


def _digest_of(meta: dict) -> hashlib._Hash:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode())


def _bytes_of(tensor: Tensor):
    """View a tensor on the CPU as a buffer of bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _write_header(file: BinaryIO, meta: dict, digest: str, tensors: dict) -> None:
    text = json.dumps({**meta, "sha256": digest}, sort_keys=True)
    header, offset_bytes = {"__metadata__": {"quantmla_cache": text}}, 0
    for name, (dtype, shape) in tensors.items():
        end_bytes = offset_bytes + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": shape,
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    file.write(len(data).to_bytes(8, "little") + data)


def _parts(pools: LatentPools, contents: _Contents) -> Iterator[Tensor]:
    """Yield the data of the file in its order, a few MB at a time."""
    number = {page: i for i, page in enumerate(contents.pages)}
    tables = [number[page] for state in contents.states for page in state.pages]
    yield torch.tensor(tables, dtype=torch.int32)
    for layer, rows in enumerate(pools.rows):
        for run in _runs_of_blobs(pools, layer, len(contents.blobs)):
            yield pools.host_blobs(layer, contents.blobs[run], contents.used_tokens[run])
        for state in contents.states:
            yield rows[state.slot, : pools.used_rows(state.tokens)].cpu()


def _runs_of_blobs(pools: LatentPools, layer: int, n_blobs: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // pools.layouts[layer].page_bytes)
    for start in range(0, n_blobs, step):
        yield slice(start, min(n_blobs, start + step))


def load_requests(cache: PagedLatentCache, path: str | Path) -> dict[Hashable, int]:
    """Add the requests of a file to a cache.

    Data goes to pages and slots that are free; they are taken only if all of it was right.

    Args:
        cache: where they go.
        path: file of save_requests.
    Returns: tokens by request.
    Raises: CacheError if the file is damaged or does not fit the cache.
    Source: safetensors format.
    """
    from safetensors import SafetensorError, safe_open

    damaged = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads(file.metadata()["quantmla_cache"])
            expected = meta.pop("sha256")
            _check_meta(cache, meta, path)
            ids = [entry["id"] for entry in meta["requests"]]
            cache.check_new(ids, "load")
            digest = _digest_of(meta)
            contents = _place(cache, meta["requests"], _read_tables(cache.pools, meta, file))
            _check_tensors(file, contents.tensors(cache.pools))
            _read_data(cache.pools, file, contents, digest)
            if digest.hexdigest() != expected:
                raise ValueError(f"sha256 {digest.hexdigest()}, not {expected}")
    except (OSError, *damaged) as error:
        kept = isinstance(error, OSError)
        raise CacheError(
            "a saved cache cannot be read",
            where=path,
            expected="a complete file of PagedLatentCache.save",
            got=f"{type(error).__name__}: {error}",
            next_step="check the path and its permissions"
            if kept
            else "delete the file and compute the tokens again",
        ) from error
    cache.allocator.take(len(contents.pages))
    for state in contents.states:
        cache.allocator.share(state.pages)
    cache.allocator.release(contents.pages)  # the requests hold them now
    del cache.free_slots[len(cache.free_slots) - len(ids) :]
    cache.states.update(zip(ids, contents.states, strict=True))
    return {request: cache.tokens(request) for request in ids}


def _check_meta(cache: PagedLatentCache, meta: dict, where: str | Path) -> None:
    """Refuse another version, checkpoint or page size, and lengths that cannot be."""
    pools = cache.pools
    for name, own in (("format", FILE_VERSION), ("page_tokens", pools.page_tokens)):
        if meta[name] != own:
            raise CacheError(
                f"a saved cache has another {name}",
                where=where,
                expected=f"{name} {own}",
                got=f"{name} {meta[name]!r}",
                next_step="load it into a cache like the one that wrote it",
            )
    origin = (meta["fingerprint"], meta["geometry"])
    check_origin(*origin, cache.fingerprint, pools.geometry(), where)
    requests, limit = meta["requests"], pools.n_pages * pools.page_tokens
    if len({(type(entry["id"]), entry["id"]) for entry in requests}) != len(requests):
        raise ValueError("an id occurs twice")
    for entry in requests:
        known = type(entry["id"]) in (str, int)
        tokens, intact_from = entry["tokens"], entry["intact_from"]
        if not known or type(tokens) is not int or type(intact_from) is not int:
            raise ValueError(f"request {entry}")
        if not 0 <= tokens <= limit:
            raise CacheError(
                "a saved request does not fit the cache",
                where=where,
                expected=f"at most {limit} tokens in {pools.n_pages} pages",
                got=f"{tokens} tokens in request {entry['id']!r}",
                next_step="create the cache with more pages",
            )
        if not pools.sink_tokens <= intact_from <= max(tokens, pools.sink_tokens):
            raise ValueError(f"rows from {intact_from} of {tokens} tokens")


def _read_tables(pools: LatentPools, meta: dict, file) -> tuple[list[int], Tensor]:
    """Return how many pages each request has, and the numbers of all of them."""
    counts = [pools.pages_for(entry["tokens"]) for entry in meta["requests"]]
    _check_tensors(file, {"tables": (torch.int32, (sum(counts),))})
    return counts, file.get_tensor("tables")


def _check_tensors(file, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Compare the header with what the lengths ask for, before any memory is taken."""
    for name, (dtype, shape) in tensors.items():
        part = file.get_slice(name)
        got = (part.get_dtype(), tuple(part.get_shape()))
        if got != (DTYPES[dtype], shape):
            raise ValueError(f"{name} is {got}, not {(DTYPES[dtype], shape)}")


def _place(
    cache: PagedLatentCache, requests: list[dict], tables: tuple[list[int], Tensor]
) -> _Contents:
    """Choose free pages and slots for the requests of a file."""
    numbers = tables[1].tolist()
    n_pages = 0
    for number in numbers:
        # pages are numbered as they first occur
        if not 0 <= number <= n_pages:
            raise ValueError(f"page {number} behind {n_pages} pages")
        n_pages = max(n_pages, number + 1)
    pages = cache.allocator.offer(n_pages, "PagedLatentCache.load")
    slots = cache.free_slots[len(cache.free_slots) - len(requests) :]
    states, done = [], 0
    for entry, count, slot in zip(requests, tables[0], slots, strict=True):
        own = array("i", [pages[number] for number in numbers[done : done + count]])
        states.append(RequestState(slot, entry["intact_from"], own, entry["tokens"]))
        done += count
    return _Contents.of(cache.pools, states)


def _read_data(pools: LatentPools, file, contents: _Contents, digest: hashlib._Hash) -> None:
    """Copy all data of the file to its pages and slots, a few MB at a time."""
    digest.update(_bytes_of(file.get_tensor("tables")))
    for layer, (pages, rows) in enumerate(zip(pools.pages, pools.rows, strict=True)):
        saved = file.get_slice(f"layers.{layer}.pages")
        for run in _runs_of_blobs(pools, layer, len(contents.blobs)):
            part = saved[run]
            digest.update(_bytes_of(part))
            pages.index_copy_(0, pools.index(contents.blobs[run]), part.to(pools.device))
        saved, done = file.get_slice(f"layers.{layer}.rows"), 0
        for state in contents.states:
            used = pools.used_rows(state.tokens)
            if used:
                part = saved[done : done + used]
                digest.update(_bytes_of(part))
                rows[state.slot, :used] = part.to(pools.device)
            done += used
