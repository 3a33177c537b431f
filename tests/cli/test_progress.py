from quantmla.cli import progress as module
from quantmla.cli.common import format_cell, state
from quantmla.cli.progress import progress


def test_lines_say_how_much_is_left(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 5.0, 40.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(state, "quiet", False)
    with progress("calibrate") as tell:
        tell("layer 1", 20, 100)
        tell("layer 2", 30, 100)  # too soon after the last line
        tell("layer 3", 40, 100)
    captured = capsys.readouterr()
    assert captured.out == ""
    # 20 units took 40 s, 60 are left
    assert captured.err.splitlines() == [
        "calibrate: layer 1, 20%",
        "calibrate: layer 3, 40%, about 120 s left",
    ]


def test_quiet_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr(state, "quiet", True)
    with progress("calibrate") as tell:
        tell("layer 1", 1, 2)
    assert capsys.readouterr().err == ""


def test_cells():
    assert [format_cell(v) for v in (None, 1234567, 0.01234, 33.9, "x", True)] == [
        "",
        "1,234,567",
        "0.0123",
        "33.900",
        "x",
        "True",
    ]
