"""The lines and the bar that people see."""

from __future__ import annotations

import io
import re

import pytest

from titanyaml.tracker.console import PlainLines, ProgressBar, describe, duration, make_console

RECORD = {
    "loss": 2.34567,
    "grad_norm": 0.5,
    "lr": 3e-4,
    "tokens": 99,
    "tps": 12345.6,
    "tflops": 1.234,
    "mfu": 0.4123,
    "mem_reserved_gib": 10.0,
    "step_s": 0.25,
    "data_wait_s": 0.001,
}


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def lines_at(times: list[float], *, steps: int, extra: dict[int, dict] | None = None) -> list[str]:
    clock, out = Clock(), io.StringIO()
    lines = PlainLines(steps, out=out, clock=clock)
    for step, seconds in enumerate(times, 1):
        clock.seconds = seconds
        lines.log({"step": step, "loss": float(step), **(extra or {}).get(step, {})})
    lines.close("done")
    return out.getvalue().splitlines()


def steps_of(lines: list[str]) -> list[int]:
    return [int(re.match(r"step +(\d+)/", line)[1]) for line in lines]


def test_units_stand_beside_the_figures() -> None:
    assert describe({"step": 1, **RECORD}) == (
        "loss 2.3457  grad norm 0.500  lr 3.00e-04  12,346 tokens/s/device  1.23 TFLOP/s  MFU 41.2%  "
        "10.00 GiB reserved  0.250 s/step"
    )
    assert describe({"step": 1, "loss": 1.0, "mfu": None}) == "loss 1.0000"


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (59.7, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_at_most_a_line_a_second_but_first_last_and_validation() -> None:
    times = [i / 8 for i in range(30)]
    lines = lines_at(times, steps=30, extra={5: {"validation_loss": 1.5}})
    assert steps_of(lines) == [1, 5, 13, 21, 29, 30]
    assert "validation loss 1.5000" in lines[1]


def test_slow_steps_are_all_shown_with_the_time_left() -> None:
    lines = lines_at([0, 10, 20], steps=50)
    assert steps_of(lines) == [1, 2, 3]
    assert "left" not in lines[0] and lines[1].endswith("8 min 00 s left") and lines[2].endswith("7 min 50 s left")


def test_a_skipped_record_is_shown_at_the_end() -> None:
    assert steps_of(lines_at([0, 0.1, 0.2], steps=50)) == [1, 3]


def test_plain_lines_in_a_pipe_have_no_control_characters() -> None:
    out = io.StringIO()
    sink = make_console(3, out=out)
    assert isinstance(sink, PlainLines)
    sink.log({"step": 1, **RECORD})
    assert out.getvalue().isprintable() or out.getvalue().rstrip("\n").isprintable()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    out = Terminal()
    bar = make_console(10, out=out)
    assert isinstance(bar, ProgressBar)
    for step in (4, 5, 6):
        bar.log({"step": step, **RECORD})
    bar.log({"step": 6, "validation_loss": 1.25})
    bar.close("done")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "6/10" in text and "12,346 tokens/s/device" in text and "loss 2.3457" in text and "left" in text
    assert "step 6/10  validation loss 1.2500" in text


def test_closing_a_bar_that_never_began() -> None:
    out = Terminal()
    make_console(10, out=out).close("failed")
    assert out.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_that_goes_away_stops_nothing(terminal: bool) -> None:
    class Gone(Terminal):
        calls = 0

        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            self.calls += 1
            raise BrokenPipeError

    out = Gone()
    sink = make_console(3, out=out)
    for step in (1, 2, 3):
        sink.log({"step": step, "loss": 1.0, "validation_loss": 1.0})
    sink.close("done")
    assert out.calls >= 1
