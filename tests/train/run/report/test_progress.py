"""The progress display: what it says, that it fits, and that its numbers are right."""

import io
import math

import pytest
from rich.console import Console

from mupax.train.run.report.progress import Progress, Timing

pytestmark = pytest.mark.core


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Run:
    """A run of equal steps on a console that records."""

    def __init__(
        self, *, total=2000, start=0, width=80, terminal=True, unit="tokens", peak=None, **options
    ):
        self.clock = Clock()
        self.console = Console(
            file=io.StringIO(), record=True, width=width, force_terminal=terminal
        )
        self.timing = Timing(unit, 3e6, peak)
        self.progress = Progress(
            total, start, self.timing, self.console, clock=self.clock, **options
        )

    def steps(self, count, seconds=0.1, loss=1.5, units=8192, first=None, waited=0.0):
        for _ in range(count):
            took = seconds if first is None else first
            first = None
            self.clock.now += took
            self.timing.step(took, units, waited)
            self.progress.update(self.progress.step + 1, loss, lr=1.25e-3)

    def drawn(self):
        """The live line as it is now."""
        self.console.print(self.progress)
        return self.console.export_text().rstrip("\n")


def test_before_the_first_step_it_says_what_it_waits_for():
    run = Run()
    run.clock.now += 12
    assert "   0/2000" in run.drawn()
    assert run.drawn().endswith("waiting for the first step, 0:12")


def test_the_line_of_a_run():
    run = Run(width=120, peak=1e12)
    run.steps(500, first=20.0)
    line = run.drawn()
    assert line.startswith(" 500/2000")
    # 81,920 tokens/s * 3e6 FLOPs / 1e12, and 1500 steps of 0.1 s.
    assert line.endswith("loss 1.5000  lr 1.25e-03  81.9k tokens/s  MFU 25%  eta 2:30")


def test_the_rate_leaves_out_the_compile_and_follows_the_last_seconds():
    run = Run()
    run.steps(1, first=60.0)
    assert "tokens/s" not in run.drawn()
    assert run.progress.seconds_left is None
    run.steps(1)
    assert run.timing.recent.rate == pytest.approx(81920)
    run.steps(300)
    run.steps(300, seconds=0.2)  # 60 s at half the speed: six time constants.
    assert run.timing.recent.rate == pytest.approx(40960, rel=0.01)


def test_the_time_left_counts_evaluations():
    run = Run(total=1000)
    for _ in range(5):
        run.steps(100)
        run.clock.now += 10  # An evaluation that takes as long as its hundred steps.
    run.steps(1)
    assert run.progress.seconds_left == pytest.approx(2 * 499 * 0.1, rel=0.02)
    run.clock.now += 7  # A slow step: the estimate goes on counting.
    assert run.progress.seconds_left == pytest.approx(2 * 499 * 0.1 - 7, rel=0.02)


def test_no_utilization_without_a_known_peak():
    run = Run(width=160, peak=None)
    run.steps(100)
    assert run.timing.utilization(run.timing.recent) is None
    assert "MFU" not in run.drawn()


def test_waiting_for_data_is_shown_where_it_matters():
    run = Run(width=160)
    run.steps(100, first=20.0, waited=0.004)
    assert run.timing.recent.data_wait == pytest.approx(0.04)
    assert "data wait" not in run.drawn()
    run.steps(600, waited=0.03)
    assert "tokens/s  data wait 30%  eta" in run.drawn()


def test_a_resumed_run_starts_where_it_stopped():
    run = Run(total=2000, start=1000)
    assert "1000/2000" in run.drawn()
    run.steps(501, first=20.0)
    assert run.progress.seconds_left == pytest.approx(499 * 0.1)
    assert "1501/2000" in run.drawn()


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 70, 80, 100, 120, 200])
@pytest.mark.parametrize("loss", [1.5, 12345.678, math.nan])
def test_the_line_never_wraps(width, loss):
    run = Run(width=width, peak=1e12, total=2_000_000, start=1_000_000)
    texts = [run.drawn()]
    run.steps(1, loss=loss)
    texts.append(run.drawn())
    run.steps(30, loss=loss, waited=0.05)
    texts.append(run.drawn())
    for text in texts:
        assert "\n" not in text
        assert len(text) <= width
        assert text.startswith("10000")


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (60, ["loss", "tokens/s", "eta", "━"], ["lr", "MFU"]),
        (80, ["loss", "lr", "tokens/s", "MFU", "eta", "━"], []),
        (120, ["loss", "lr", "tokens/s", "MFU", "eta", "━" * 20], []),
        (34, ["loss", "eta"], ["lr", "MFU", "━", "tokens/s"]),
    ],
)
def test_a_narrow_terminal_drops_the_least_needed(width, shown, hidden):
    run = Run(width=width, peak=1e12)
    run.steps(1234)
    text = run.drawn()
    assert [part for part in shown if part not in text] == []
    assert [part for part in hidden if part in text] == []


def test_the_bar_is_as_long_as_the_run_is_done():
    run = Run(total=100, width=120)
    run.steps(75)
    run.console.export_text()
    run.console.print(run.progress)
    bar = [text for text, _, _ in run.console._record_buffer if "━" in text]
    assert [len(text) for text in bar] == [30, 9]  # Of 40, one of them the half sign between.


def test_evaluations_and_notes_are_printed_as_given():
    run = Run(total=2000)
    run.clock.now += 70
    run.progress.evaluated({"step": 500, "eval_loss": 1.61234, "eval_accuracy": 0.512})
    run.progress.evaluated({"step": 2000, "eval_loss": 1.5})
    run.progress.note("saved [bold]x[/bold] " + "y" * 90)
    assert run.console.export_text().splitlines() == [
        "eval  step  500  loss 1.6123  accuracy 51.20 %  after 1:10",
        "eval  step 2000  loss 1.5000  after 1:10",
        "saved [bold]x[/bold] " + "y" * 90,
    ]


def test_live_display_ends_with_the_last_step_below_what_was_printed(capsys):
    run = Run(total=3)
    with run.progress:
        run.steps(2)
        run.progress.evaluated({"step": 2, "eval_loss": 1.6})
        print("printed by other code")
        run.steps(1)
        run.clock.now += 60
    screen = run.console.export_text(clear=False)
    assert "eval  step 2  loss 1.6000" in screen
    assert "printed by other code" in screen
    assert "3/3  ━" in screen.splitlines()[-1]
    assert screen.rstrip().endswith("took 1:00")
    assert capsys.readouterr().out == ""


def test_after_the_last_step_the_run_goes_on():
    run = Run(total=3)
    run.steps(3)
    assert run.drawn().endswith("tokens/s")  # The last evaluation is still to come.


def test_live_display_is_put_away_when_the_loop_fails():
    run = Run(total=3)
    with pytest.raises(KeyboardInterrupt), run.progress:
        raise KeyboardInterrupt
    assert not run.progress._live.is_started


def plain_steps(run):
    return [
        int(line.split()[1].split("/")[0])
        for line in run.console.export_text().splitlines()
        if line[:4] == "step"
    ]


@pytest.mark.parametrize(("total", "every"), [(3, 1), (60, 5), (150, 10), (200, 10), (201, 20)])
def test_plain_lines_of_a_quick_run_are_at_round_steps(total, every):
    run = Run(total=total, terminal=False)
    with run.progress:
        run.steps(total, seconds=0.01)
    assert plain_steps(run) == sorted({1, *range(every, total + 1, every), total})


def test_plain_lines_of_a_slow_run_are_ten_seconds_apart():
    run = Run(total=100_000, terminal=False, width=60)
    with run.progress:
        run.steps(95, seconds=1.0)
    text = run.console.export_text(clear=False)
    assert plain_steps(run) == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 95]
    # Longer than the console is wide, and still one line each; no codes for a terminal.
    assert (
        text.splitlines()[-1]
        == "step     95/100000  loss 1.5000  lr 1.25e-03  8.19k tokens/s  eta 1d 03:45"
    )
    assert "\x1b" not in run.console.file.getvalue()


def test_a_stopped_run_says_where_once():
    run = Run(total=2000, terminal=False)
    with run.progress:
        run.steps(7)
    assert plain_steps(run) == [1, 7]


@pytest.mark.parametrize("terminal", [True, False])
def test_switched_off_it_still_prints_evaluations(terminal):
    run = Run(total=3, terminal=terminal, enabled=False)
    with run.progress:
        run.steps(3)
        run.progress.evaluated({"step": 3, "eval_loss": 1.5})
    assert run.console.export_text().splitlines() == ["eval  step 3  loss 1.5000  after 0:00"]


def test_a_quiet_console_leaves_standard_output_alone(capsys):
    console = Console(quiet=True, force_terminal=True)
    with Progress(3, 0, Timing("images", 1.0, None), console) as progress:
        print("another process prints")
        progress.update(step=1, loss=1.0, lr=1.0)
        progress.evaluated({"step": 1, "eval_loss": 1.0})
    assert capsys.readouterr().out == "another process prints\n"


def test_the_screen_has_nats_per_byte_beside_nats_per_token():
    run = Run(width=120)
    run.timing.step(0.1, 8192, 0.0)
    run.progress.update(1, 3.0, lr=1e-3, loss_per_byte=0.75)
    assert "loss 3.0000 (0.7500/byte)" in run.drawn()
    run.progress.evaluated(
        {"step": 1, "eval_loss": 3.5, "eval_loss_per_byte": 0.875, "eval_accuracy": 0.5}
    )
    assert "loss 3.5000 (0.8750/byte)" in run.console.export_text()
    run.progress.update(2, 3.0, lr=1e-3, loss_per_byte=3.0)
    assert "byte" not in run.drawn(), "a token is a byte"
