"""One file a source: the paper's table in its docstring and one pure function under it. `PRESETS` names them all."""

from __future__ import annotations

from collections.abc import Callable

from mupax.presets.papers.completep import completep
from mupax.presets.papers.effective_theory import hybrid, maximal_update, ntk
from mupax.presets.papers.infinite_limits import depth_mup, mup, mup_half
from mupax.presets.papers.layerwise import sp_layerwise
from mupax.presets.papers.spectral import spectral
from mupax.presets.papers.standard import sp
from mupax.presets.papers.unit import u_mup
from mupax.presets.preset import Preset

PRESETS: dict[str, Callable[..., Preset]] = {
    "sp": sp,
    "mup": mup,
    "mup-half": mup_half,
    "depth-mup": depth_mup,
    "completep": completep,
    "ntk": ntk,
    "hybrid": hybrid,
    "maximal-update": maximal_update,
    "u-mup": u_mup,
    "spectral": spectral,
    "sp-layerwise": sp_layerwise,
}
"""Name to the function that makes the preset from its constants."""

ALIASES = {"standard": "sp"}
"""Other names of presets, as papers and older files have them; nothing here writes them."""
