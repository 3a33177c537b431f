"""Perplexity by window length, token KL and top-1 flips, measured through the packed cache.

The reference is the original model in BF16 rows through the same absorbed attention, so that what
is reported is
the loss of quantising and not the difference between expanded and absorbed attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from quantmla.errors import EvaluationError
from quantmla.evaluate.model import Settings, Subject, loaded, new_cache
from quantmla.evaluate.reference import Reference, ReferenceFile
from quantmla.evaluate.row import NOT_FINITE_NEXT, describe, expected_pairs, validity
from quantmla.text import Windows


def measure_fidelity(
    reference: Subject,
    subjects: Iterable[Subject],
    windows: Windows,
    settings: Settings,
    *,
    scratch: Path,
) -> Iterator[dict]:
    """Score the reference once, then every subject against it, one model in memory at a time.

    Args:
        reference: scored first; its log-probabilities are kept on disk until the last subject.
        subjects: what to compare with it; may be made one by one, while this runs.
        windows: Windows.
        settings: Settings.
        scratch: existing folder for the reference file, 4 * tokens * vocab bytes.
    Returns: the row of the reference, then one row per subject, each as soon as it is there; a row
        that read no packed row has valid=False.
    Raises: EvaluationError if the logits are not finite or the model's context is too short.
    Source: algorithms.md 10.3, field reports FR-090 and FR-097.
    """
    with loaded(reference.folder, settings) as model:
        shape = (*windows.ids.shape, model.config.get_text_config().vocab_size)
        file = ReferenceFile(scratch, shape)
        row = score(model, reference, windows, settings, write_to=file)
    with file:
        yield row
        for subject in subjects:
            with loaded(subject.folder, settings) as model:
                row = score(model, subject, windows, settings, compare_with=file)
            yield row


def score(
    model: torch.nn.Module,
    subject: Subject,
    windows: Windows,
    settings: Settings,
    *,
    write_to: Reference | None = None,
    compare_with: Reference | None = None,
) -> dict:
    """Score one model on all windows.

    Args:
        model: from `loaded(subject.folder)`.
        subject, windows, settings: what, on which tokens, and how.
        write_to: keeps the log-probabilities.
        compare_with: log-probabilities of the reference on the same windows.
    Returns: the result row.
    Raises: EvaluationError if the logits are not finite or the window exceeds the model's context.
    Source: own.
    """
    check_context(model, windows)
    started = time.perf_counter()
    parts, packed_rows = [], 0
    for first in range(0, len(windows.ids), settings.batch):
        ids = windows.ids[first : first + settings.batch]
        cache = new_cache(subject, settings)
        files = {"write_to": write_to, "compare_with": compare_with}
        parts.append(score_tokens(model, ids, cache, settings, subject.method, first, **files))
        if cache is not None:
            packed_rows += cache.packed_rows_read
    nll = sum(part.nll.double().sum().item() for part in parts)
    kl = sum(part.kl.double().sum().item() for part in parts)
    flips = sum(int(part.flips.sum()) for part in parts)
    scored = windows.tokens - len(windows.ids)
    row = {
        "method": subject.method,
        "ppl": math.exp(nll / scored),
        "nll": nll / scored,
        "kl": kl / scored if compare_with is not None else None,
        "top1_flips": flips / scored if compare_with is not None else None,
        "predictions": scored,
        "seconds_s": round(time.perf_counter() - started, 2),
    }
    row |= describe(subject, settings) | _describe_windows(windows)
    starts = list(range(0, windows.window_tokens, settings.chunk_tokens))
    pairs = expected_pairs(row, windows.window_tokens, starts)
    row["packed_rows_read"] = packed_rows
    row["packed_rows_expected"] = pairs * len(windows.ids) * row["packed_layers"]
    return row | validity(row)


def check_context(model: torch.nn.Module, windows: Windows) -> None:
    """Refuse windows that are longer than what a model was made for.

    Args: model; windows.
    Raises: EvaluationError.
    Source: own.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and windows.window_tokens > limit:
        raise EvaluationError(
            "the window is longer than the model's context",
            where="--window",
            expected=f"at most {limit} tokens",
            got=f"{windows.window_tokens} tokens",
            next_step="use a smaller --window",
        )


@dataclass(frozen=True)
class TokenScores:
    """Scores of every predicted token of some windows, on the CPU.

    Fields:
        nll [B, S-1, float32]: negative log-likelihood, nats.
        kl [B, S-1, float32]: KL(reference, model), nats; 0 without a reference.
        flips [B, S-1, bool]: the most likely token is another one than the reference's.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    flips: torch.Tensor


def score_tokens(
    model: torch.nn.Module,
    ids: torch.Tensor,
    cache,
    settings: Settings,
    label: str,
    first: int = 0,
    *,
    write_to: Reference | None = None,
    compare_with: Reference | None = None,
) -> TokenScores:
    """Score windows in one batch.

    Args:
        model: on settings.device.
        ids [B, S, int64]: windows.
        cache: empty QuantMLACache, or None for stock attention.
        settings: chunk length and device.
        label, first: method and number of the first window, for messages and the reference.
        write_to: keeps the log-probabilities.
        compare_with: log-probabilities of the reference.
    Returns: TokenScores.
    Raises: EvaluationError if the logits are not finite.
    Source: algorithms.md 10.3.
    """
    parts = []
    for start, logprobs in _chunks(model, ids, cache, settings):
        extremes = torch.stack(torch.aminmax(logprobs))  # a NaN is both of them; 20x isfinite
        if not bool(extremes.isfinite().all()):
            raise EvaluationError(
                "the logits are not finite",
                where=f"{label}, window {first}, from token {start}",
                expected="finite numbers",
                got="NaN or Inf",
                next_step=NOT_FINITE_NEXT,
            )
        if write_to is not None:
            write_to.write(first, start, logprobs)
        targets = ids[:, 1:][:, start : start + logprobs.shape[1]].to(logprobs.device)
        predicted = logprobs[:, : targets.shape[1]]  # the last position has no target
        nll = -predicted.gather(2, targets[..., None])[..., 0]
        kl, flips = torch.zeros_like(nll), torch.zeros_like(nll, dtype=torch.bool)
        if compare_with is not None:
            expected = compare_with.read(first, start, predicted.shape[:2]).to(predicted.device)
            kl = F.kl_div(predicted, expected, reduction="none", log_target=True).sum(-1)
            flips = predicted.argmax(-1) != expected.argmax(-1)
        parts.append([part.cpu() for part in (nll, kl, flips)])
    return TokenScores(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


@torch.inference_mode()
def _chunks(
    model, ids: torch.Tensor, cache, settings: Settings
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first token, log-probabilities [B, S, vocab, float32]); strict mode hides the cut."""
    kwargs = cache.as_kwargs(model) if cache is not None else {"use_cache": False}
    step = settings.chunk_tokens
    logits = None
    for start in range(0, ids.shape[1], step):
        if cache is not None:
            chunk = ids[:, start : start + step].to(settings.device)
            logits = model(input_ids=chunk, **kwargs).logits
        elif logits is None:  # without a cache in one call; only the rest is cut
            logits = model(input_ids=ids.to(settings.device), **kwargs).logits
        part = logits if cache is not None else logits[:, start : start + step]
        yield start, F.log_softmax(part.float(), dim=-1)


def _describe_windows(windows: Windows) -> dict:
    return {
        "window": windows.window_tokens,
        "tokens": windows.tokens,
        "bos": windows.bos_token_id is not None,
        "text_sha256": windows.text_sha256,
        "tokens_sha256": windows.tokens_sha256,
    }


def summary(row: dict) -> str:
    """Say a fidelity row in one line.

    Args: row [from measure_fidelity].
    Source: own.
    """
    kl = "" if row["kl"] is None else f", KL {row['kl']:.4f}"
    name = f"{row['method']} {row['scheme']} ({row['attention']})"
    return f"{name}: perplexity {row['ppl']:.3f}{kl}, {row['seconds_s']:.0f} s"
