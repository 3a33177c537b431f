"""All that `quantmla ablate` does: calibrate, climb the ladder, one table.

Every finished piece is a file, so that a stopped ablation goes on where it was: a layer of a
recipe, a layer of the first rung, a cell on a shard of the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager

from quantmla.ablate.bootstrap import Resampler
from quantmla.ablate.cells import Cell
from quantmla.ablate.folder import BF16, Folder
from quantmla.ablate.gate import Verdict, rule
from quantmla.ablate.plan import Ablation, Material, identity_of, open_material
from quantmla.ablate.rungs import Tell, measure_layers, measured, score_promoted, verdicts_of
from quantmla.ablate.scoring import is_packed
from quantmla.ablate.table import build_rows
from quantmla.checkpoint.lock import folder_lock
from quantmla.errors import GateError
from quantmla.evaluate.manifest import build_manifest, git_revision
from quantmla.evaluate.model import Settings
from quantmla.files import atomic_write, storage_errors

RESULTS_NAME = "results.json"

ProgressOf = Callable[[str], AbstractContextManager[Tell]]


def run_ablation(
    ablation: Ablation,
    settings: Settings,
    *,
    resume: bool,
    say: Callable[[str], None],
    progress: ProgressOf,
) -> dict:
    """Run an ablation.

    Args:
        ablation, settings: what and how; `settings.prefill` must be strict.
        resume: go on with what is in ablation.out.
        say: called with one line at a time.
        progress: called with a title; gives a context manager of a (what, done, total) function.
    Returns: {"ablation": {"rows", "rule", ..}, "rows": [], "manifest"}, also in results.json.
    Raises: any QuantMLAError.
    Source: own; ladder of algorithms.md section 10.3.
    """
    material = open_material(ablation, settings)
    with folder_lock(ablation.out):
        folder = Folder(ablation.out)
        identity = identity_of(ablation, settings, material)
        revisions = folder.open(identity, git_revision(), resume)
        with progress("calibrate") as tell:
            material.calibrations.run(
                list(ablation.cells),
                ablation.model,
                ablation.calibration_text,
                device=settings.device,
                workers=ablation.workers,
                progress=tell,
            )
        with progress("layers") as tell:
            measure_layers(ablation, settings, material, folder, tell)
        verdicts = verdicts_of(ablation, material, folder)
        kept = sum(verdict.promoted for verdict in verdicts.values())
        say(f"ladder gate: {kept} of {len(verdicts)} cells are scored by the whole model")
        with progress("scores") as tell:
            score_promoted(ablation, settings, material, folder, verdicts, tell)
        result = _result(ablation, settings, material, folder, verdicts, revisions)
        with storage_errors(ablation.out):
            atomic_write(ablation.out / RESULTS_NAME, json.dumps(result, indent=1) + "\n")
    return result


def _result(
    ablation: Ablation,
    settings: Settings,
    material: Material,
    folder: Folder,
    verdicts: dict[Cell, Verdict],
    revisions: list[str],
) -> dict:
    shards = len(ablation.shards(material.windows))
    reference = folder.scores(BF16, shards)
    resampler = Resampler.of(
        tuple(reference.tokens.nll.shape),
        ablation.block_tokens,
        ablation.resamples,
        ablation.base.seed,
    )
    packed = {cell: is_packed(cell, material.calibrations.transforms(cell)) for cell in verdicts}
    layers = {cell: measured(material, folder, cell) for cell in verdicts}
    rows = build_rows(
        verdicts,
        layers,
        packed,
        lambda cell: folder.scores(cell, shards),
        reference,
        material.dims,
        resampler,
    )
    recipes = material.calibrations.recipes(list(ablation.cells))
    manifest = build_manifest(
        models={"model": ablation.model},
        texts=material.texts,
        recipes={f"{recipe.method} {recipe.scheme.name}": recipe.sha256() for recipe in recipes},
        seed=ablation.base.seed,
        device=settings.device,
        tokenizer_sha256=material.tokenizer_sha256,
    )
    return {
        "ablation": {
            "rows": rows,
            "rule": rule(ablation.gate),
            "bf16": {
                "ppl": float(reference.tokens.nll.double().mean().exp()),
                "bytes_per_token": material.dims.bf16_bytes_per_token,
            },
            "sizes": [material.dims.kv_lora_rank, material.dims.qk_rope_head_dim],
            "window_tokens": ablation.window_tokens,
            "tokens": material.windows.tokens,
            "policy": list(ablation.policy),
            "settings": vars(settings),
            "recipe": ablation.base.model_dump(mode="json"),
            "bootstrap": {
                "block_tokens": ablation.block_tokens,
                "blocks": len(resampler.sizes),
                "resamples": ablation.resamples,
            },
            "revisions": revisions,
        },
        "rows": [],
        "manifest": manifest,
    }


def require_valid_cells(result: dict) -> None:
    """Stop if a scored cell did not read what the policy says.

    Args: result [of run_ablation].
    Raises: GateError naming the cells.
    Source: field report FR-090.
    """
    bad = [row for row in result["ablation"]["rows"] if row["promoted"] and not row["valid"]]
    if bad:
        raise GateError(
            "the run is invalid: it did not measure the packed cache",
            where=", ".join(row["cell"] for row in bad),
            expected=f"{bad[0]['packed_rows_expected']} packed rows read",
            got=bad[0]["invalid_reason"],
            next_step="use longer windows",
        )
