"""Identifiers of licences for the header of a model card.

Hugging Face shows a licence only for an identifier that it knows.
"""

from __future__ import annotations

import difflib

from mupax import MupaxError

_TABLE = (
    "afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m "
    "bigscience-bloom-rail-1.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause "
    "bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 "
    "cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 "
    "cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 "
    "cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 "
    "epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma "
    "gfdl gpl gpl-2.0 gpl-3.0 h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr "
    "llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl "
    "odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 pddl postgresql unlicense wtfpl "
    "zlib"
)
IDENTIFIERS = tuple(_TABLE.split())
"""Identifiers of huggingface.co/docs/hub/repositories-licenses.

`other` and `unknown` are left out, because they state no licence.
"""
_SPDX_ENDINGS = ("-only", "-or-later")
"""Endings of SPDX identifiers that Hugging Face's identifiers lack."""
_SHOWN = 3
"""Number of similar identifiers in a message."""


class LicenceError(MupaxError):
    """An unknown identifier of a licence. The message has similar ones."""


def identifier(text: str) -> str:
    """Return Hugging Face's identifier of a licence, in small letters.

    Args:
        text: identifier that the user typed, Hugging Face's or SPDX's, in any case.

    Raises:
        LicenceError: Hugging Face does not know the licence.
    """
    name = text.strip().lower()
    for ending in _SPDX_ENDINGS:
        name = name.removesuffix(ending)
    if name in IDENTIFIERS:
        return name

    hint = "write such as apache-2.0, mit or cc-by-4.0."
    near = difflib.get_close_matches(name, IDENTIFIERS, n=_SHOWN, cutoff=0.5)
    if near:
        hint = f"did you mean {', '.join(near)}?"
    raise LicenceError(
        f"--licence {text}: no licence has this identifier at Hugging Face; {hint} Or leave it "
        "out: the card then says that none is stated"
    )
