"""The rungs of the ladder over all cells: layers first, then the text, shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from quantmla.ablate.cells import Cell
from quantmla.ablate.distortion import FIT_WINDOWS, HELDOUT_WINDOWS, LayerWindows, measure_layer
from quantmla.ablate.folder import BF16, Folder, ShardScores
from quantmla.ablate.gate import Verdict, judge
from quantmla.ablate.plan import Ablation, Material
from quantmla.ablate.scoring import ExchangeModel, Statics, cell_cache, score_cell
from quantmla.calibrate.capture import capture_layers
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.engine.hf import QuantMLACache
from quantmla.evaluate.fidelity import check_context
from quantmla.evaluate.model import Settings, loaded
from quantmla.evaluate.reference import ReferenceFile, ReferenceTensor
from quantmla.transform.layer import LayerTransform

Tell = Callable[[str, int, int], None]


def measure_layers(
    ablation: Ablation, settings: Settings, material: Material, folder: Folder, tell: Tell
) -> None:
    """First rung: output error of each cell on each layer, from one more pass over the model."""
    layers = range(material.dims.num_cache_layers)
    missing = {
        layer: [cell for cell in ablation.cells if cell.name not in known]
        for layer in layers
        for known in (folder.layer(layer),)
    }
    missing = {layer: cells for layer, cells in missing.items() if cells}
    if not missing:
        return
    base, config = ablation.base, CheckpointReader(ablation.model).config
    fit = range(min(FIT_WINDOWS, base.sequences))
    heldout = range(base.sequences, base.sequences + min(HELDOUT_WINDOWS, base.heldout_sequences))
    picked = LayerWindows(tuple(range(len(fit))), tuple(range(len(fit), len(fit) + len(heldout))))
    captures = capture_layers(
        ablation.model,
        material.calibration[[*fit, *heldout]],
        device=settings.device,
        skip=set(layers) - set(missing),
    )
    units, done = sum(map(len, missing.values())), 0
    for capture in captures:
        transform = material.calibrations.transform
        here = {cell: transform(cell, capture.layer) for cell in missing[capture.layer]}
        rows = measure_layer(
            capture,
            here,
            picked,
            family_of(config).rope_pairing_cache(config),
            ablation.policy,
            settings.device,
            lambda cells, at=done, layer=capture.layer: tell(
                f"layer {layer + 1}/{len(layers)}", at + cells, units
            ),
        )
        folder.save_layer(capture.layer, rows)
        done += len(here)
        del capture  # before the next layer is recorded


def measured(material: Material, folder: Folder, cell: Cell) -> list[dict]:
    """Return what the first rung measured of a cell, one entry a layer.

    Source: own.
    """
    return [folder.layer(layer)[cell.name] for layer in range(material.dims.num_cache_layers)]


def verdicts_of(ablation: Ablation, material: Material, folder: Folder) -> dict[Cell, Verdict]:
    """Return which cells go on to the second rung.

    Source: own.
    """
    sizes = (material.dims.kv_lora_rank, material.dims.qk_rope_head_dim)
    distortions = {}
    for cell in ablation.cells:
        distortions[cell] = fmean(layer["both"] for layer in measured(material, folder, cell))
    sizes_bytes = {cell: cell.format.logical_bytes(*sizes) for cell in ablation.cells}
    return judge(distortions, sizes_bytes, ablation.gate)


def score_promoted(
    ablation: Ablation,
    settings: Settings,
    material: Material,
    folder: Folder,
    verdicts: dict[Cell, Verdict],
    tell: Tell,
) -> None:
    """Score the promoted cells, shard by shard; the reference of a shard is made once a run."""
    promoted = [cell for cell in ablation.cells if verdicts[cell].promoted]
    shards = ablation.shards(material.windows)
    todo = {
        shard: cells
        for shard in range(len(shards))
        for cells in ([cell for cell in promoted if not folder.has_scores(cell, shard)],)
        if cells or not folder.has_scores(BF16, shard)
    }
    if not todo:
        return
    units, done = sum(len(cells) + 1 for cells in todo.values()), 0
    with loaded(ablation.model, settings) as model:
        check_context(model, material.windows)
        exchange, config = ExchangeModel(model, ablation.model), model.config
        vocab = config.get_text_config().vocab_size
        for shard, cells in todo.items():
            ids = shards[shard]
            with _reference(ablation, settings, (*ids.shape, vocab)) as reference:
                exchange.take([LayerTransform()] * material.dims.num_cache_layers)
                scored = score_cell(
                    model,
                    lambda: QuantMLACache.from_scheme(
                        "c16r16", config, check_finite=True, kernels="never"
                    ),
                    ids,
                    settings,
                    BF16,
                    write_to=reference,
                )
                folder.save_scores(BF16, shard, ShardScores(*scored))
                done += 1
                for cell in cells:
                    tell(f"shard {shard + 1}/{len(shards)} {cell.name}", done, units)
                    transforms = material.calibrations.transforms(cell)
                    statics = _statics(material, folder, cell)
                    exchange.take(transforms)
                    scored = score_cell(
                        model,
                        lambda c=cell, t=transforms, s=statics: cell_cache(
                            c, t, s, config, ablation.policy
                        ),
                        ids,
                        settings,
                        cell.name,
                        compare_with=reference,
                    )
                    folder.save_scores(cell, shard, ShardScores(*scored))
                    done += 1


def _reference(ablation: Ablation, settings: Settings, shape: tuple[int, int, int]):
    if settings.device == "cpu":
        return ReferenceFile(ablation.out, shape)
    return ReferenceTensor(shape, settings.device)


def _statics(material: Material, folder: Folder, cell: Cell) -> Statics:
    layers = measured(material, folder, cell)
    return [(layer["content_static"], layer["rope_static"]) for layer in layers]
