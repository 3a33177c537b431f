"""Read a sharded safetensors checkpoint: headers first and bounded, then single tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantmla.checkpoint.header import TensorInfo, read_header, read_json
from quantmla.errors import CheckpointError
from quantmla.files import sha256_file

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WRITER_NAME = "quantmla.safetensors"  # our side file: clip ratios, never model weights
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class CheckpointReader:
    """A checkpoint folder whose index, files and headers were checked to agree.

    Args:
        path: folder with config.json and either model.safetensors or an index with its shards.

    Raises:
        CheckpointError: anything missing, truncated, left over or inconsistent, by name.

    Source: own.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                "no such checkpoint folder",
                where=self.path,
                expected="a folder with config.json and safetensors files",
                next_step="download the checkpoint, or correct the path",
            )
        self.config = read_json(self.path / CONFIG_NAME)
        self.index = read_json(self.path / INDEX_NAME) if self._has(INDEX_NAME) else None
        self.shards = self._shards()
        self._refuse_stray_shards()
        self.tensors: dict[str, TensorInfo] = {}
        for shard in self.shards:
            for name, info in read_header(self.path / shard).items():
                if name in self.tensors:
                    raise CheckpointError(
                        "a tensor is stored twice",
                        where=name,
                        got=f"in {self.tensors[name].shard} and in {shard}",
                        next_step="remove the shard that does not belong to this checkpoint",
                    )
                self.tensors[name] = info
        self._check_index()
        self._open_shard: tuple[str, object] | None = None

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """All tensor names, by shard and then in file order."""
        return tuple(self.tensors)

    @property
    def is_fused(self) -> bool:
        """True when quantmla wrote this checkpoint."""
        return "quantmla" in self.config

    def refuse_fused(self) -> None:
        """Refuse a checkpoint that quantmla wrote, where an original one is needed.

        Raises:
            CheckpointError: the config has a quantmla block.
        """
        if self.is_fused:
            raise CheckpointError(
                "the source checkpoint is already fused",
                where=self.path / CONFIG_NAME,
                expected="an original checkpoint",
                got="a quantmla block",
                next_step="name the checkpoint that it was made from; fusing twice stacks errors",
            )

    def info(self, name: str) -> TensorInfo:
        """Return where a tensor lies.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        if name not in self.tensors:
            leaf = name.rsplit(".", 2)[-2:]
            near = [n for n in self.tensors if n.rsplit(".", 2)[-2:] == leaf][:3]
            raise CheckpointError(
                "a tensor is missing from the checkpoint",
                where=name,
                expected="a tensor of this name in one of the shards",
                got=f"{len(self.tensors)} other tensors"
                + (f", for example {near}" if near else ""),
                next_step="download the checkpoint again, or check its model_type",
            )
        return self.tensors[name]

    def shard_of(self, name: str) -> str:
        """Return the file name that holds a tensor."""
        return self.info(name).shard

    def dtype_of(self, name: str) -> str:
        """Return the stored dtype in safetensors spelling."""
        return self.info(name).dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the stored shape."""
        return self.info(name).shape

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype; one shard stays open between calls."""
        from safetensors import SafetensorError, safe_open

        shard = self.shard_of(name)
        try:
            if self._open_shard is None or self._open_shard[0] != shard:
                self._open_shard = (shard, safe_open(self.path / shard, framework="pt"))
            return self._open_shard[1].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "a tensor cannot be read", where=f"{name} in {shard}", got=str(error)
            ) from error

    def check_float(self, name: str, shape: tuple[int, ...]) -> None:
        """Check by its header that a weight can be computed with.

        Args:
            name: tensor name.
            shape: what the config promises.

        Raises:
            CheckpointError: missing, another shape, or not a plain float dtype.
        """
        info = self.info(name)
        if info.shape != tuple(shape):
            raise CheckpointError(
                "a weight has another shape than config.json says",
                where=f"{name} in {info.shard}",
                expected=list(shape),
                got=list(info.shape),
                next_step="check that config.json belongs to these shards",
            )
        if info.dtype not in FLOAT_DTYPES:
            packed = "FP8 blocks" if info.dtype.startswith("F8") else "a packed or integer format"
            raise CheckpointError(
                f"a weight is stored as {packed}, and its scales would have to be folded in first",
                where=f"{name} in {info.shard}",
                expected=" or ".join(FLOAT_DTYPES),
                got=info.dtype,
                next_step="use the BF16 release of the model, or convert its attention to BF16",
            )

    def get_float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one weight that arithmetic is done on.

        Args:
            name: tensor name.
            shape: what the config promises.

        Raises:
            CheckpointError: as `check_float`, or NaN / Inf inside.
        """
        self.check_float(name, shape)
        tensor = self.get(name)
        bad = int((~tensor.isfinite()).sum())
        if bad:
            raise CheckpointError(
                "a weight holds NaN or Inf",
                where=f"{name} in {self.shard_of(name)}",
                expected="finite numbers",
                got=f"{bad} of {tensor.numel()} values",
                next_step="download the shard again, or repair the run that wrote it",
            )
        return tensor

    def sha256(self, name: str) -> str:
        """Return the hex SHA-256 of a tensor's stored bytes."""
        info = self.info(name)
        return sha256_file(self.path / info.shard, info.start, info.end)

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def _shards(self) -> tuple[str, ...]:
        if self.index is None:
            if self._has(SINGLE_NAME):
                return (SINGLE_NAME,)
            found = sorted(p.name for p in self.path.glob("*.safetensors") if p.name != WRITER_NAME)
            raise CheckpointError(
                "the checkpoint has no index and no single weight file",
                where=self.path,
                expected=f"{SINGLE_NAME}, or {INDEX_NAME} and its shards",
                got=found or "no safetensors file",
                next_step="download the missing files; pickled .bin weights are not read",
            )
        weight_map = self.index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError("the index lists no tensors", where=self.path / INDEX_NAME)
        shards = sorted({str(shard) for shard in weight_map.values()})
        unsafe = [s for s in shards if Path(s).name != s or not s.endswith(".safetensors")]
        missing = [s for s in shards if s not in unsafe and not self._has(s)]
        if unsafe or missing:
            raise CheckpointError(
                "the index names files that are not there"
                if missing
                else "the index is not usable",
                where=self.path / INDEX_NAME,
                expected="safetensors files in the same folder",
                got=", ".join(missing or unsafe),
                next_step="download the missing shards",
            )
        return tuple(shards)

    def _refuse_stray_shards(self) -> None:
        present = {p.name for p in self.path.glob("*.safetensors")} - {WRITER_NAME}
        stray = sorted(present - set(self.shards))
        if stray:
            raise CheckpointError(
                "the folder holds weight files that the checkpoint does not use",
                where=self.path,
                expected=f"only {', '.join(self.shards[:3])}{' ...' if self.shards[3:] else ''}",
                got=", ".join(stray),
                next_step="remove or move the extra files; a loader might pick them up",
            )

    def _check_index(self) -> None:
        if self.index is None:
            return
        weight_map = self.index["weight_map"]
        wrong = [
            f"{name}: index says {weight_map.get(name, 'nothing')}, "
            f"file says {self.tensors[name].shard if name in self.tensors else 'nothing'}"
            for name in sorted(set(weight_map) | set(self.tensors))
            if name not in self.tensors or weight_map.get(name) != self.tensors[name].shard
        ]
        if wrong:
            raise CheckpointError(
                "the index and the shards disagree",
                where=self.path / INDEX_NAME,
                expected="every tensor listed with the shard that holds it",
                got=f"{len(wrong)} differences; first {wrong[0]}",
                next_step="download the checkpoint again into an empty folder",
            )
