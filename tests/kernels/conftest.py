"""Where the kernels of a test run: Triton's interpreter on a CPU, and a GPU."""

import pytest

from quantmla.kernels.support import implementation


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    if request.param == "cpu":
        pytest.importorskip("triton")
        if implementation("cpu")[0] != "interpreter":
            pytest.skip("where there is a GPU, Triton compiles and does not interpret")
    return request.param
