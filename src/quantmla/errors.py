"""Exceptions: one readable block that says what, where, expected, got and what to do next.

QuantMLAError
    SchemeError              a bit scheme, recipe or `quantmla` block that cannot be used
    CheckpointError          files on disk: missing, truncated, inconsistent, already fused
    TextError                a text or task file: missing, not UTF-8, too short
    UnsupportedModelError    a model family that is not, or must not be, handled
    CalibrationError         data, capture or training of the transforms
    CacheError               misuse of the packed cache or of its attention function
    KernelUnavailableError   no kernel for this format, device or machine; lists every reason
    EvaluationError          scoring that could not be carried out
    GateError                scoring was carried out and a quality or validity gate failed
"""


class QuantMLAError(Exception):
    """Base of every error that quantmla raises on purpose.

    Args:
        what: one sentence without a final stop.
        where: tensor, layer, field or file.
        expected: what would have been right.
        got: what was found.
        next_step: what the reader can do about it.
    Source: own.
    """

    exit_code = 1

    def __init__(self, what, *, where=None, expected=None, got=None, next_step=None):
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.next_step = next_step
        parts = (("where", where), ("expected", expected), ("got", got), ("next", next_step))
        lines = [f"  {label}: {value}" for label, value in parts if value is not None]
        super().__init__("\n".join([str(what), *lines]))


class SchemeError(QuantMLAError):
    """A bit scheme, recipe or `quantmla` block that cannot be used."""


class CheckpointError(QuantMLAError):
    """Files of a checkpoint are missing, truncated, inconsistent or not what the step needs."""


class TextError(QuantMLAError):
    """A text or task file is missing, not UTF-8, too short or of another form."""


class UnsupportedModelError(QuantMLAError):
    """The model family is not, or must not be, handled."""


class CalibrationError(QuantMLAError):
    """Calibration data, capture or training failed."""


class CacheError(QuantMLAError):
    """The packed cache or its attention function was used in a way that cannot be exact."""


class KernelUnavailableError(QuantMLAError):
    """No kernel can do this; `got` lists every reason."""


class EvaluationError(QuantMLAError):
    """A score could not be computed."""


class GateError(QuantMLAError):
    """A quality or validity gate failed; the command line exits with 3."""

    exit_code = 3
