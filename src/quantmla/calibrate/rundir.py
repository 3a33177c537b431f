"""The folder of a calibration run: manifest, finished layers, and the state to go on from."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmla import __version__
from quantmla.checkpoint.header import read_json
from quantmla.errors import CalibrationError
from quantmla.files import atomic_write, fsync_folder, storage_errors
from quantmla.transform.layer import LayerTransform

if TYPE_CHECKING:
    import torch

    from quantmla.calibrate.data import CalibrationData
    from quantmla.checkpoint.plan import AttentionLayers
    from quantmla.config import Recipe

MANIFEST_NAME = "run.json"
MANIFEST_VERSION = 1
VERSIONED = ("torch", "transformers", "safetensors")


def build_manifest(
    layers: AttentionLayers,
    data: CalibrationData,
    recipes: list[Recipe],
    settings: dict[str, str | int],
) -> dict[str, Any]:
    """Return everything that decides the bytes of a run.

    Args:
        layers: attention layers of the source, whose every tensor is hashed.
        data: token windows.
        recipes: what is calibrated.
        settings: dtypes, device and threads of the computation.

    Returns:
        Plain JSON data.

    Source: own.
    """
    from quantmla.config import canonical_sha256

    reader = layers.reader
    return {
        "format": MANIFEST_VERSION,
        "source": {
            "config_sha256": canonical_sha256(reader.config),
            "tensors_sha256": canonical_sha256(
                {
                    name: [info.dtype, list(info.shape), reader.sha256(name)]
                    for name, info in reader.tensors.items()
                }
            ),
        },
        "text": data.provenance(),
        "recipes": {recipe_name(recipe): recipe.model_dump(mode="json") for recipe in recipes},
        "settings": settings,
        "versions": {
            "quantmla": __version__,
            **{name: importlib.metadata.version(name) for name in VERSIONED},
        },
    }


def recipe_name(recipe: Recipe) -> str:
    """Return the folder name of a recipe's layers, such as `quantmla-c4r4-0123456789ab`."""
    return f"{recipe.method}-{recipe.scheme.name}-{recipe.sha256()[:12]}"


class RunDir:
    """Files of one run; every one of them appears whole or not at all.

    Args:
        path: folder of the run.
        num_layers: cache layers of the model.
    """

    def __init__(self, path: str | Path, num_layers: int) -> None:
        self.path = Path(path)
        self.num_layers = num_layers

    def open(self, manifest: dict[str, Any], resume: bool) -> None:
        """Start a new run, or check that the one found here is the same and may go on.

        Args:
            manifest: from `build_manifest`.
            resume: go on if there is something.

        Raises:
            CalibrationError: the folder holds something and `resume` is off, or another run.
            CheckpointError: the folder cannot be written.
        """
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            found = any(self.path.iterdir())
        path = self.path / MANIFEST_NAME
        if found and not resume:
            raise CalibrationError(
                "the run folder already holds something",
                where=self.path,
                expected="no such folder, or an empty one",
                got=f"{len(list(self.path.iterdir()))} entries",
                next_step="add --resume to go on with that run, or choose another folder",
            )
        if path.is_file():
            self._compare(read_json(path), manifest)
        elif found:
            raise CalibrationError(
                "the folder is not one of a calibration run",
                where=self.path,
                expected=MANIFEST_NAME,
                got="other files",
                next_step="choose another folder",
            )
        with storage_errors(self.path):
            self.drop_left_overs()
            for name in manifest["recipes"]:
                (self.path / name).mkdir(exist_ok=True)
            if not path.is_file():
                atomic_write(path, json.dumps(manifest, indent=1, sort_keys=True) + "\n")

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        new = json.loads(json.dumps(new))
        for part in sorted(set(old) | set(new)):
            before, now = old.get(part), new.get(part)
            if before == now:
                continue
            if isinstance(before, dict) and isinstance(now, dict):
                keys = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
                part = f"{part}: {', '.join(keys)}"
                before, now = ({k: side.get(k) for k in keys} for side in (before, now))
            raise CalibrationError(
                "this run cannot go on, because something that decides its result has changed",
                where=f"{self.path / MANIFEST_NAME}, {part}",
                expected=json.dumps(before),
                got=json.dumps(now),
                next_step="restore what was changed, or start a new run in another folder",
            )

    def layer_path(self, recipe: Recipe, layer: int) -> Path:
        """Return where the transform of one layer lies."""
        return self.path / recipe_name(recipe) / f"layer-{layer:04d}.safetensors"

    def finished(self, recipe: Recipe) -> set[int]:
        """Return the cache layers that are done; each of their files is read as a check."""
        done = {i for i in range(self.num_layers) if self.layer_path(recipe, i).is_file()}
        for layer in done:
            LayerTransform.load(self.layer_path(recipe, layer))
        return done

    def save_hidden(self, decoder: int, hidden: torch.Tensor) -> None:
        """Keep the input [n, T, D] of a decoder layer until `drop_hidden`."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._hidden_path(decoder)
        temporary = path.with_name(f".{path.name}.tmp")
        with storage_errors(path):
            try:
                save_file({"hidden": hidden}, temporary)
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
            except SafetensorError as error:
                raise OSError(_errno_of(error), str(error), str(path)) from error
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(self.path)

    def load_hidden(self, decoder: int) -> tuple[int, torch.Tensor] | None:
        """Return the latest kept (decoder layer, input) at or before one, None to start over."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for start in range(decoder, 0, -1):
            path = self._hidden_path(start)
            if path.is_file():
                try:
                    return start, load_file(path)["hidden"].clone()
                except (OSError, SafetensorError, KeyError):
                    continue  # damaged: an earlier one, or the embeddings, give the same values
        return None

    def drop_hidden(self, before: int | None = None) -> None:
        """Remove the kept inputs of all decoder layers, or of those before one.

        A layer's own input is needed until the layer is finished, not only captured.
        """
        with storage_errors(self.path):
            for path in self.path.glob("hidden-*.safetensors"):
                if before is None or path.name < self._hidden_path(before).name:
                    path.unlink()

    def drop_left_overs(self) -> None:
        """Remove what killed processes were writing; no other process may be at work here."""
        for path in self.path.rglob(".*.tmp"):
            path.unlink()

    def _hidden_path(self, decoder: int) -> Path:
        return self.path / f"hidden-{decoder:04d}.safetensors"


def _errno_of(error: Exception) -> int:
    """Return the system error number that safetensors writes as `(os error 28)`."""
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else errno.EIO
