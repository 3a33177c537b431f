"""Settings of every test: offline, one thread, a fixed seed, and memory that is never zero."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; read when triton is imported


def pytest_configure():
    from transformers.utils import logging

    logging.disable_progress_bar()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def poison_empty(monkeypatch):
    """Fill memory from torch.empty and its relatives with NaN, or 101 in integers.

    A test that still passes under it reads nothing that was not written.
    """

    def poisoned(allocate):
        def call(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            with torch.no_grad():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(float("nan"))
                else:
                    tensor.fill_(101)
            return tensor

        return call

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    """Where kernels run: Triton's interpreter on a CPU, and a GPU."""
    from quantmla.kernels.support import implementation

    if request.param == "cpu":
        pytest.importorskip("triton")
        if implementation("cpu")[0] != "interpreter":
            pytest.skip("where there is a GPU, Triton compiles and does not interpret")
    return request.param
