"""`mupax presets joint`: rules for batch and tokens, and the flags that say how far a run is from its base."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from tyro import conf

from mupax.command_line import Switch
from mupax.presets import horizon, joint
from mupax.presets.analysis import joint_limits
from mupax.presets.roles import RUN_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How far a run is from the one that its numbers were tuned on."""

    batch: Annotated[str, conf.arg(metavar="FROM:TO")] = "1:1"
    """The base's batch and the run's, as 8:64."""
    tokens: Annotated[str, conf.arg(metavar="FROM:TO")] = "1:1"
    """The base's tokens and the run's, as 1:8."""
    b1: float = 0.9
    """Adam's at the base, to see whether a rule leaves (0, 1)."""
    b2: float = 0.95
    """The same."""

    def ends(self) -> list[tuple[float, float]]:
        """Batch and tokens, of the base and of the run; raises PresetError for texts that are none."""
        return [joint.ends("--batch", self.batch), joint.ends("--tokens", self.tokens)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joint(RunFlags):
    """Rules for batch and tokens beside width and depth: formulas, values, and what each rests on.

    B is batch over base batch, T tokens over base tokens. Rules contradict each other on T; --joint of a run applies one marked so.
    """

    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        ratios = {
            name: stop / start for name, (start, stop) in zip(RUN_AXES, self.ends(), strict=True)
        }
        if self.json:
            return print_json([rule.to_json(ratios) for rule in horizon.RULES.values()])
        print(joint_limits.joint_text(ratios, b1=self.b1, b2=self.b2))
        return 0


def print_json(value: Any) -> int:
    """Prints a value as JSON: the exit code 0."""
    print(json.dumps(value, indent=2))
    return 0
