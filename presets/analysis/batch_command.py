"""`mupax presets joint`, and the flags for a run whose batch and tokens are not the base's."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from tyro import conf

from mupax.command_line import Switch, refuse_idle
from mupax.presets import horizon, joint
from mupax.presets.analysis import joint_limits
from mupax.presets.roles import RUN_AXES, PresetError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Command-line flags for how batch and tokens of a run differ from those of its base.

    The base is the run at which the optimizer's settings were tuned.
    """

    batch: Annotated[str, conf.arg(metavar="FROM:TO")] = "1:1"
    """Batch of the base and batch of the run, such as 8:64."""
    tokens: Annotated[str, conf.arg(metavar="FROM:TO")] = "1:1"
    """Tokens of the base and tokens of the run, such as 1:8."""
    b1: float = 0.9
    """Adam's b1 at the base. Rules that take it out of (0, 1) are reported."""
    b2: float = 0.95
    """Adam's b2 at the base. Rules that take it out of (0, 1) are reported."""

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise PresetError(f"--{name} is {value}; write a number in [0, 1), such as 0.9")
        # The rules scale betas by powers of the ratios, so nothing happens to them at the base.
        if all(start == stop for start, stop in self.ends()):
            reason = "if batch and tokens are the base's"
            refuse_idle(self, ("b1", "b2"), reason, "add --batch FROM:TO, such as 8:64")

    def ends(self) -> list[tuple[float, float]]:
        """Return the pairs (base, run) of the flags `--batch` and `--tokens`, in this order.

        Raises:
            PresetError: A flag is not FROM:TO with two numbers above 0.
        """
        return [joint.ends("--batch", self.batch), joint.ends("--tokens", self.tokens)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joint(RunFlags):
    """Rules for batch and tokens, in addition to width and depth: formulas, values and evidence.

    B is batch over base batch, T is tokens over base tokens. Sources contradict each other on T.
    `--joint NAME` of a run applies a rule. The rules that can be applied show this flag.
    """

    json: Switch = False
    """Print JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.json:
            refuse_idle(self, ("b1", "b2"), "with --json", "leave --json out")

    def run(self) -> int:
        """Print the joint rules, as JSON if `json` is set, and return the exit code 0."""
        ratios = {}
        for axis, (start, stop) in zip(RUN_AXES, self.ends(), strict=True):
            ratios[axis] = stop / start
        if self.json:
            return print_json([rule.to_json(ratios) for rule in horizon.RULES.values()])
        print(joint_limits.joint_text(ratios, b1=self.b1, b2=self.b2))
        return 0


def print_json(value: Any) -> int:
    """Print a value as indented JSON, and return the exit code 0."""
    print(json.dumps(value, indent=2))
    return 0
