"""Presets of the papers, one file per source.

A file has the source's table and the function that makes the preset. The arguments of the function
are the preset's constants. `PRESETS` has all of these functions.
"""

from __future__ import annotations

from mupax.mappings import LazyRegistry
from mupax.presets.preset import Preset


def _import_sp():
    from mupax.presets.papers.standard import sp

    return sp


def _import_mup():
    from mupax.presets.papers.infinite_limits import mup

    return mup


def _import_mup_half():
    from mupax.presets.papers.infinite_limits import mup_half

    return mup_half


def _import_depth_mup():
    from mupax.presets.papers.infinite_limits import depth_mup

    return depth_mup


def _import_completep():
    from mupax.presets.papers.completep import completep

    return completep


def _import_ntk():
    from mupax.presets.papers.effective_theory import ntk

    return ntk


def _import_hybrid():
    from mupax.presets.papers.effective_theory import hybrid

    return hybrid


def _import_maximal_update():
    from mupax.presets.papers.effective_theory import maximal_update

    return maximal_update


def _import_u_mup():
    from mupax.presets.papers.unit import u_mup

    return u_mup


def _import_spectral():
    from mupax.presets.papers.spectral import spectral

    return spectral


def _import_sp_layerwise():
    from mupax.presets.papers.layerwise import sp_layerwise

    return sp_layerwise


# Functions and not names of modules, so that a search for references finds every preset.
PRESETS: LazyRegistry[..., Preset] = LazyRegistry(
    {
        "sp": _import_sp,
        "mup": _import_mup,
        "mup-half": _import_mup_half,
        "depth-mup": _import_depth_mup,
        "completep": _import_completep,
        "ntk": _import_ntk,
        "hybrid": _import_hybrid,
        "maximal-update": _import_maximal_update,
        "u-mup": _import_u_mup,
        "spectral": _import_spectral,
        "sp-layerwise": _import_sp_layerwise,
    }
)
"""Functions that make a preset from its constants, by the preset's name.

To add a preset, write its function in a file of this folder, and add an import and a line here.
"""

ALIASES = {"standard": "sp"}
"""Other names of presets, in papers and in older files. mupax itself does not write them."""
