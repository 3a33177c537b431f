"""The cells of an ablation: which transforms, in which format, under which policy."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantmla.ablate.forms import SIMULATED, Form, form_of
from quantmla.errors import EvaluationError

SCHEMES = ("c4r4", "c3r4", "c2r4", "c4r8", "c4r16")
SQUARE = ("rtn", "quantmla")  # identity and learned, on either path
OTHERS = (
    "smoothquant",
    "smoothquant_tuned",
    "quarot_offline",
    "quarot_angles",
    "quarot_online",
    "quantmla_plus",
    "flatquant",
)
# which path gains: the extensions, or an unconstrained matrix, on one and QuantMLA on the other
ONE_SIDED = tuple(
    pair
    for method in ("quantmla_plus", "flatquant")
    for pair in ((method, "quantmla"), ("quantmla", method))
)
SAME_CONTENT = ("quarot_offline", "quarot_angles")  # as quarot_online, whatever the RoPE path
ROTATED = ("rtn", "quarot_online")  # what a simulated format is measured with
# Formats whose sense depends on the transform: (content method, RoPE method).
OWN_PAIRS = {
    "c4-kivi4": (("rtn", "rtn"), ("quarot_online", "rtn"), ("quantmla", "rtn")),
    "c2-kivi4": (("rtn", "rtn"), ("quarot_online", "rtn"), ("quantmla", "rtn")),
    "fp8": (("rtn", "rtn"),),
    "fp8-r16": (("rtn", "rtn"),),
    "fp8-tile": (("rtn", "rtn"),),
    "book4": (("quarot_online", "quarot_online"),),
    "book2-book4": (("quarot_online", "quarot_online"),),
    "norm4-r4": (("quarot_online", "quarot_online"), ("quarot_online", "quantmla")),
    "norm2-r4": (("quarot_online", "quarot_online"), ("quarot_online", "quantmla")),
}


@dataclass(frozen=True)
class Cell:
    """One point of the ablation.

    Args:
        form: name of the format.
        content, rope: methods whose content and RoPE transforms are used.
        policy: sinks and window are read in BF16.
    """

    form: str
    content: str
    rope: str
    policy: bool = True

    @property
    def name(self) -> str:
        """Such as `c4r4/quantmla/policy` or `c4r4/quantmla+rtn/bare` (content + RoPE)."""
        method = self.content if self.content == self.rope else f"{self.content}+{self.rope}"
        return f"{self.form}/{method}/{'policy' if self.policy else 'bare'}"

    @property
    def core(self) -> bool:
        """Whether it belongs to the square of identity and learned transforms of a scheme."""
        return self.form not in SIMULATED and {self.content, self.rope} <= set(SQUARE)

    @property
    def format(self) -> Form:
        """Its format."""
        return form_of(self.form)


def all_cells() -> list[Cell]:
    """Return every cell: squares, baselines and simulated formats, under either policy.

    Source: own.
    """
    cells = []
    for name in (*SCHEMES, *SIMULATED):
        for policy in (True, False):
            for content, rope in _pairs(form_of(name)):
                cells.append(Cell(name, content, rope, policy))
    return list(dict.fromkeys(cells))


def _pairs(form: Form) -> list[tuple[str, str]]:
    if form.name in OWN_PAIRS:
        return list(OWN_PAIRS[form.name])
    if form.packed:
        square = [(content, rope) for content in SQUARE for rope in SQUARE]
        pairs = square + [(method, method) for method in OTHERS] + list(ONE_SIDED)
    else:
        pairs = [(method, method) for method in (*ROTATED, "quantmla")]
    if form.rope_bits == 16:  # where no method changes anything
        pairs = [(content, "rtn") for content, _ in pairs if content not in SAME_CONTENT]
    return pairs


def select(patterns: list[str]) -> list[Cell]:
    """Return the cells whose names match one of some patterns; all of them without a pattern.

    Args: patterns [such as `c4r4/*`, `*/quantmla/policy`].
    Raises: EvaluationError for a pattern that matches nothing.
    Source: own.
    """
    cells = all_cells()
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            raise EvaluationError(
                "no cell has such a name",
                where=f"--cells {pattern}",
                expected="format/method/policy or format/method/bare, with * for anything",
                got=pattern,
                next_step="--dry-run lists all cells",
            )
    chosen = patterns or ["*"]
    return [cell for cell in cells if any(fnmatchcase(cell.name, p) for p in chosen)]
