"""One file a source: the paper's table in its docstring and one pure function under it. `PRESETS` names them all."""

from __future__ import annotations

from collections.abc import Callable

from mupax.presets.preset import Preset
from mupax.table import Table

PRESETS: Table[Callable[..., Preset]] = Table(
    __name__,
    {
        "sp": "standard:sp",
        "mup": "infinite_limits:mup",
        "mup-half": "infinite_limits:mup_half",
        "depth-mup": "infinite_limits:depth_mup",
        "completep": "completep:completep",
        "ntk": "effective_theory:ntk",
        "hybrid": "effective_theory:hybrid",
        "maximal-update": "effective_theory:maximal_update",
        "u-mup": "unit:u_mup",
        "spectral": "spectral:spectral",
        "sp-layerwise": "layerwise:sp_layerwise",
    },
)
"""Name to the function that makes the preset from its constants. To add one, write the function in a file here and a line."""

ALIASES = {"standard": "sp"}
"""Other names of presets, as papers and older files have them; nothing here writes them."""
