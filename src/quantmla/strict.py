"""Base and field types of the models in config.py: strict, frozen, every problem a SchemeError."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from quantmla.errors import SchemeError

# 1 bit exists for sanity checks only; 16 means plain BF16 rows without scale and zero.
BITS = (1, 2, 3, 4, 8, 16)


def _known_bits(bits: int) -> int:
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}")
    return bits


# Not a Literal: that would let True through as 1.
Bits = Annotated[int, AfterValidator(_known_bits)]
# Bit planes are packed in whole bytes, so groups are whole multiples of eight channels.
Group = Annotated[int, Field(ge=8, le=4096, multiple_of=8)]
Tokens = Annotated[int, Field(ge=0, le=1 << 20)]
ClipRatio = Annotated[float, Field(gt=0.0, le=1.0)]
Clip = ClipRatio | Literal["learned"] | None
Zero = Literal["zp8", "min16"]
Pairing = Literal["interleaved", "half"]
Method = Literal[
    "rtn",
    "smoothquant",
    "smoothquant_tuned",
    "quarot_online",
    "quarot_offline",
    "quarot_angles",
    "quantmla",
    "quantmla_plus",
    "flatquant",
]
LearningRate = Annotated[float, Field(gt=0.0, le=10.0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_K_V_FIELDS = {"k_bits", "v_bits", "key_bits", "value_bits"}


class StrictModel(BaseModel):
    """Base: strict types, no unknown fields, immutable, errors as SchemeError."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_problem(cls, data: Any, handler):
        _refuse_k_v_fields(data, cls.__name__)
        try:
            return handler(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in (cls.__name__, *first["loc"]))
            raise SchemeError(
                "a setting cannot be used",
                where=field,
                expected=first["msg"],
                got=repr(first["input"])[:200],
                next_step=f"fields of {cls.__name__}: {', '.join(cls.model_fields)}",
            ) from None


def _refuse_k_v_fields(data: Any, where: str) -> None:
    """Key and value bits mean nothing on a latent that serves as both: refuse them at any depth."""
    if not isinstance(data, Mapping):
        return
    for name, value in data.items():
        if name in _K_V_FIELDS:
            raise SchemeError(
                "key and value bits have no meaning in an MLA cache",
                where=f"{where}.{name}",
                expected="content_bits (latent) and rope_bits (rotated key)",
                got=f"{name}: {value!r}",
                next_step=f"replace {name} by content_bits and rope_bits",
            )
        _refuse_k_v_fields(value, f"{where}.{name}")


def read_yaml(path: Path, most_bytes: int) -> Any:
    """Read a small YAML file; anything wrong with it is a SchemeError."""
    import yaml

    problem = None
    try:
        if path.stat().st_size > most_bytes:
            problem = f"{path.stat().st_size} bytes"
        else:
            return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise SchemeError(
        "a recipe file cannot be read",
        where=path,
        expected=f"a UTF-8 YAML file of at most {most_bytes} bytes",
        got=problem,
        next_step="correct the path or the file",
    )
