import shutil

import pytest
import torch

from quantmla.errors import EvaluationError
from quantmla.evaluate.reference import ReferenceFile, ReferenceTensor


def test_what_is_written_is_read_back_chunk_by_chunk(tmp_path):
    stored = torch.randn(3, 10, 7)
    with ReferenceFile(tmp_path, (3, 10, 7)) as file:
        for start in (0, 4, 8):
            file.write(0, start, stored[:2, start : start + 4])
            file.write(2, start, stored[2:, start : start + 4])
        assert torch.equal(file.read(0, 0, (3, 10)), stored)
        assert torch.equal(file.read(1, 3, (2, 5)), stored[1:, 3:8])


def test_in_memory_it_is_the_same_array():
    stored = torch.randn(3, 10, 7)
    with ReferenceTensor((3, 10, 7), "cpu") as tensor:
        for start in (0, 4, 8):
            tensor.write(0, start, stored[:2, start : start + 4])
            tensor.write(2, start, stored[2:, start : start + 4])
        assert torch.equal(tensor.read(0, 0, (3, 10)), stored)
        assert torch.equal(tensor.read(1, 3, (2, 5)), stored[1:, 3:8])


def test_nothing_is_left_behind(tmp_path):
    with ReferenceFile(tmp_path, (1, 2, 3)) as file:
        file.write(0, 0, torch.zeros(1, 2, 3))
        assert list(tmp_path.iterdir()) == []  # without a name: gone even after kill -9
    assert list(tmp_path.iterdir()) == []


def test_a_small_disk_is_noticed_before_the_work(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10**6))
    with pytest.raises(EvaluationError, match="no room"):
        ReferenceFile(tmp_path, (10, 2048, 50000))


def test_a_disk_that_fills_up_is_one_error(tmp_path):
    with ReferenceFile(tmp_path, (1, 2, 3)) as file:

        class Full:
            def seek(self, offset):
                return offset

            def write(self, data):
                raise OSError(28, "No space left on device")

            def close(self):
                pass

        file._file.close()
        file._file = Full()
        with pytest.raises(EvaluationError, match="No space left"):
            file.write(0, 0, torch.zeros(1, 2, 3))
