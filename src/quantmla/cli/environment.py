"""What is installed and what this machine can do."""

from __future__ import annotations

import platform
from importlib.util import find_spec

import quantmla
from quantmla.evaluate.data import ITEM_SLICES
from quantmla.evaluate.manifest import git_revision, package_version
from quantmla.text import TEXT_SLICES

BASE = ("torch", "transformers", "safetensors", "huggingface-hub", "typer", "pydantic", "rich")
OPTIONAL = {
    "gguf": "quantmla[demo]",
    "accelerate": "quantmla[demo]",
    "matplotlib": "quantmla[report]",
    "jinja2": "quantmla[report]",
}


def environment() -> dict:
    """Collect versions, devices and what is missing.

    Returns: JSON data; `missing` says what each absent package would give and how to install it.
    Source: own.
    """
    import torch

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "quantmla": quantmla.__version__,
        "revision": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in (*BASE, *OPTIONAL)},
        "missing": [
            f"{name}: pip install '{extra}'"
            for name, extra in OPTIONAL.items()
            if find_spec(name) is None
        ],
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "kernels": {device: _kernels(device) for device in ("cpu", *_cuda_devices())},
        "texts": sorted(TEXT_SLICES),
        "tasks": sorted(ITEM_SLICES),
    }


def _cuda_devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{index}" for index in range(count)]


def _kernels(device: str) -> str:
    from quantmla.kernels.support import implementation

    name, reasons = implementation(device)
    return f"{name} ({'; '.join(reasons)})" if reasons else name
