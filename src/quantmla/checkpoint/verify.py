"""Check a fused checkpoint: untouched bytes, the identity of every layer, and the fingerprint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from quantmla.checkpoint.manifest import fingerprint, read_manifest, writer_hashes
from quantmla.checkpoint.plan import AttentionLayers
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.checkpoint.writer import names_of
from quantmla.config import QuantMLABlock, canonical_sha256
from quantmla.files import sha256_file
from quantmla.transform.fuse import check_identity

# Largest relative difference of a layer that rounding to the stored dtype can explain. A wrong
# pairing, a missing norm weight or a wrong head order gives 0.3 to 1.5.
IDENTITY_TOLERANCE = {"F64": 1e-7, "F32": 1e-5, "F16": 1e-2, "BF16": 5e-2}


@dataclass
class VerifyReport:
    """What was checked and what failed.

    Args:
        path: the fused folder.
        fingerprint: recomputed from the files.
        files: files hashed.
        tensors: untouched tensors compared with the source, 0 without a source.
        layer_errors: per cache layer, relative error against the source; empty without a source.
        tolerance: what `layer_errors` may reach.
        failures: one sentence each; empty when all is well.
    """

    path: str
    fingerprint: str
    files: int = 0
    tensors: int = 0
    layer_errors: list[float] = field(default_factory=list)
    tolerance: float | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when nothing failed."""
        return not self.failures

    def to_json(self) -> dict:
        """Return the report as plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def verify(path: str | Path, source: str | Path | None = None, seed: int = 0) -> VerifyReport:
    """Check a fused checkpoint against its manifest and, if given, against its source.

    Args:
        path: fused folder.
        source: the checkpoint that it was made from.
        seed: of the random inputs of the identity check.

    Returns:
        VerifyReport; failures are listed, not raised.

    Raises:
        CheckpointError: the folder is damaged or was not written by quantmla.
        SchemeError: the `quantmla` block cannot be read.

    Source: own.
    """
    reader = CheckpointReader(path)
    block = QuantMLABlock.from_config(reader.config)
    manifest = read_manifest(reader.path)
    layers = AttentionLayers.of(reader)
    report = VerifyReport(str(path), _recompute(layers, block))
    if not report.fingerprint == block.fingerprint == manifest.get("fingerprint"):
        report.failures.append(
            f"fingerprint: the files give {report.fingerprint}, config.json says"
            f" {block.fingerprint}, the manifest says {manifest.get('fingerprint')}"
        )
    if block.norm_eps != layers.dims.norm_eps:
        report.failures.append(
            f"norm_eps: config.json says {block.norm_eps}, the loader uses {layers.dims.norm_eps}"
        )
    _check_files(reader, manifest, report)
    _check_writer(reader.path, block, layers, report)
    if source is not None:
        _compare_with_source(layers, CheckpointReader(source), manifest, report, seed)
    return report


def _recompute(layers: AttentionLayers, block: QuantMLABlock) -> str:
    attention = {name: layers.reader.sha256(name) for name in layers.tensor_names()}
    return fingerprint(block, attention, writer_hashes(layers.reader.path))


def _check_files(reader: CheckpointReader, manifest: dict, report: VerifyReport) -> None:
    unlisted = [shard for shard in reader.shards if shard not in manifest["files"]]
    report.failures += [f"{shard}: not in the manifest" for shard in unlisted]
    for name, expected in manifest["files"].items():
        file = reader.path / name
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not file.is_file():
            report.failures.append(f"{name}: missing")
            continue
        report.files += 1
        if sha256_file(file) != expected:
            changed = [
                n
                for n, entry in manifest["tensors"].items()
                if n in reader.tensors
                and reader.shard_of(n) == name
                and reader.sha256(n) != entry["sha256"]
            ]
            where = f" (tensors {', '.join(changed[:3])})" if changed else ""
            report.failures.append(f"{name}: changed since it was written{where}")


def _check_writer(
    folder: Path, block: QuantMLABlock, layers: AttentionLayers, report: VerifyReport
) -> None:
    wanted = names_of(block, layers.dims.num_cache_layers)
    hashes = writer_hashes(folder)
    if wanted != set(hashes):
        missing, extra = sorted(wanted - set(hashes)), sorted(set(hashes) - wanted)
        report.failures.append(f"quantmla.safetensors: missing {missing}, unexpected {extra}")
    if block.writer_sha256 != (canonical_sha256(hashes) if wanted else None):
        report.failures.append("quantmla.safetensors: not the file that config.json names")


def _compare_with_source(
    layers: AttentionLayers,
    source: CheckpointReader,
    manifest: dict,
    report: VerifyReport,
    seed: int,
) -> None:
    reader = layers.reader
    source.refuse_fused()
    theirs = {k: v for k, v in reader.config.items() if k != "quantmla"}
    if theirs != source.config:
        report.failures.append("config.json: differs from the source beyond the quantmla block")
    if set(reader.tensors) != set(source.tensors):
        odd = sorted(set(reader.tensors) ^ set(source.tensors))
        report.failures.append(f"tensors in only one of both checkpoints: {', '.join(odd[:3])}")
        return
    for name, info in source.tensors.items():
        mine = reader.info(name)
        if (mine.dtype, mine.shape) != (info.dtype, info.shape):
            report.failures.append(f"{name}: dtype or shape differs from the source")
        elif "source_sha256" not in manifest["tensors"].get(name, {}):
            report.tensors += 1
            if reader.sha256(name) != source.sha256(name):
                report.failures.append(f"{name}: differs from the source although not fused")
    if report.ok:
        _check_layers(layers, AttentionLayers.of(source), report, seed)


def _check_layers(
    fused: AttentionLayers, source: AttentionLayers, report: VerifyReport, seed: int
) -> None:
    dtypes = {source.reader.dtype_of(name) for name in source.tensor_names()}
    report.tolerance = max(IDENTITY_TOLERANCE[dtype] for dtype in dtypes)
    for layer in range(source.dims.num_cache_layers):
        error = check_identity(
            source.weights(layer),
            fused.weights(layer),
            source.dims,
            source.pairing,
            source.dims.norm_eps,
            seed + layer,
        )
        report.layer_errors.append(error)
        if not error <= report.tolerance:
            report.failures.append(
                f"cache layer {layer}: differs from the source by {error:.3g},"
                f" more than the {report.tolerance:g} that rounding explains"
            )
