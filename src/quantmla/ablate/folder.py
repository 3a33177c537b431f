"""The folder of an ablation: what it was begun with, and the scores that are finished."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantmla.ablate.cells import Cell
from quantmla.checkpoint.header import read_json
from quantmla.errors import EvaluationError
from quantmla.evaluate.fidelity import TokenScores
from quantmla.files import atomic_write, storage_errors

STATE_NAME = "ablation.json"
BF16 = "bf16"  # in place of the name of a cell


@dataclass(frozen=True)
class ShardScores:
    """Scores of some windows in one cell.

    Fields:
        tokens: TokenScores.
        packed_rows_read, packed_rows_expected: counts over all layers and windows.
    """

    tokens: TokenScores
    packed_rows_read: int
    packed_rows_expected: int


@dataclass(frozen=True)
class Folder:
    """Files of one ablation; every one of them appears whole or not at all."""

    path: Path

    def open(self, identity: dict[str, Any], revision: str | None, resume: bool) -> list[str]:
        """Begin an ablation or go on with one.

        Args:
            identity: plain JSON data that decides every score.
            revision: of the code; the revisions that worked on a folder are kept.
            resume: go on with what is there.
        Returns: all revisions.
        Raises: EvaluationError if the folder holds something else.
        """
        path = self.path / STATE_NAME
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            found = any(self.path.iterdir())
        state = read_json(path) if path.is_file() else {"revisions": []}
        identity = json.loads(json.dumps(identity))
        known = state.get("identity", identity if not found else None)
        if (found and not resume) or known != identity:
            differs = sorted(k for k in identity if (known or {}).get(k) != identity[k])
            raise EvaluationError(
                "the folder of the ablation already holds something",
                where=self.path,
                expected="no such folder, an empty one, or with --resume one of the same settings",
                got=f"other {', '.join(differs)}" if differs else "an ablation of these settings",
                next_step="choose another --out" if differs else "add --resume",
            )
        revisions = list(dict.fromkeys([*state["revisions"], revision or "unknown"]))
        with storage_errors(path):
            content = {"identity": identity, "revisions": revisions}
            atomic_write(path, json.dumps(content, indent=1) + "\n")
        return revisions

    def layer(self, index: int) -> dict[str, dict]:
        """Return what was measured on one layer, by cell name."""
        path = self._layer_path(index)
        return read_json(path) if path.is_file() else {}

    def save_layer(self, index: int, rows: dict[str, dict]) -> None:
        """Add what was measured on one layer."""
        path = self._layer_path(index)
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
            atomic_write(path, json.dumps(self.layer(index) | rows, indent=1) + "\n")

    def has_scores(self, cell: Cell | str, shard: int) -> bool:
        """Tell whether a cell is scored on a shard."""
        return self._score_path(cell, shard).is_file()

    def save_scores(self, cell: Cell | str, shard: int, scores: ShardScores) -> None:
        """Keep the scores of a cell on a shard."""
        from safetensors.torch import save

        counts = [scores.packed_rows_read, scores.packed_rows_expected]
        tensors = {**vars(scores.tokens), "packed_rows": torch.tensor(counts)}
        path = self._score_path(cell, shard)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, save({name: t.contiguous() for name, t in tensors.items()}))

    def scores(self, cell: Cell | str, shards: int) -> ShardScores:
        """Return the scores of a cell on all shards.

        Raises: EvaluationError if a file is damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        parts = []
        for shard in range(shards):
            path = self._score_path(cell, shard)
            try:
                parts.append(load_file(path))
            except (OSError, SafetensorError) as error:
                raise EvaluationError(
                    "scores of an ablation cannot be read",
                    where=path,
                    got=f"{type(error).__name__}: {error}",
                    next_step="delete the file and go on with --resume",
                ) from error
        tokens = (torch.cat([part[name] for part in parts]) for name in ("nll", "kl", "flips"))
        counts = torch.stack([part["packed_rows"] for part in parts]).sum(0).tolist()
        return ShardScores(TokenScores(*tokens), *counts)

    def _layer_path(self, index: int) -> Path:
        return self.path / "layers" / f"layer-{index:04d}.json"

    def _score_path(self, cell: Cell | str, shard: int) -> Path:
        name = cell if isinstance(cell, str) else cell.name.replace("/", "~")
        return self.path / "scores" / name / f"shard-{shard:04d}.safetensors"
