"""Fields of positions and of what attention sees that do not fit together: one message each, before anything is built."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mupax.zoo import configs


@pytest.mark.core
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_factor": 3.0}, "model.rope_factor 3.0 is of scaled frequencies; write rope_scaling llama3 or linear"),
        ({"rope_scaling": "llama3"}, "rope_scaling llama3 is of rotary positions"),
        ({"positions": "rotary", "rope_scaling": "linear", "rope_factor": 0.5}, "rope_factor is 0.5"),
        ({"positions": "rotary", "rope_scaling": "llama3", "rope_low_freq_factor": 5.0}, "rope_low_freq_factor 5.0"),
        ({"rotary_fraction": 0.5}, "rotary_fraction is of rotary positions"),
        ({"positions": "rotary", "rotary_fraction": 0.01}, "makes an even number"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_fields_of_positions_that_do_not_fit_are_refused(fields: dict[str, Any], said: str):
    with pytest.raises(configs.ConfigError, match=said):
        dataclasses.replace(configs.get("gpt2"), **fields)
