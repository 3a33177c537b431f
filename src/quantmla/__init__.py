"""Low-bit KV caches for multi-head latent attention (MLA).

Public names are loaded on first use, so that importing quantmla stays fast and free of torch.
"""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "CacheError": "quantmla.errors",
    "CalibrationError": "quantmla.errors",
    "CheckpointError": "quantmla.errors",
    "EvaluationError": "quantmla.errors",
    "GateError": "quantmla.errors",
    "KVScheme": "quantmla.config",
    "KernelUnavailableError": "quantmla.errors",
    "LayerTransform": "quantmla.transform.layer",
    "MLADims": "quantmla.dims",
    "QuantMLABlock": "quantmla.config",
    "QuantMLACache": "quantmla.engine.hf",
    "QuantMLAError": "quantmla.errors",
    "Recipe": "quantmla.config",
    "SchemeError": "quantmla.errors",
    "TextError": "quantmla.errors",
    "UnsupportedModelError": "quantmla.errors",
    "fuse_checkpoint": "quantmla.checkpoint.fusedir",
    "run_calibration": "quantmla.calibrate.run",
    "use_packed_attention": "quantmla.engine.hf",
    "verify": "quantmla.checkpoint.verify",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'quantmla' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_EXPORTS])
