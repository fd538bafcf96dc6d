"""Whether the processes of a run were started alike: the same flags, the same data."""

from __future__ import annotations

from mupax.train.config.record import differences, to_json
from mupax.train.config.run import Config
from mupax.train.data import Data, DataError
from mupax.train.parallel.processes import Processes
from mupax.zoo.configs import ConfigError


def check_config(config: Config, processes: Processes) -> None:
    """Refuse to start with another config than process 0 has.

    Raises:
        ConfigError: the text names the field.
    """
    mine = {**to_json(config), "distributed": None}
    for path, first, own in differences(processes.broadcast("config", lambda: mine), mine):
        raise ConfigError(
            f"process {processes.index} has {path} {own} and process 0 has {first}; start all processes with the same flags"
        )


def check_data(data: Data, processes: Processes) -> None:
    """Refuse to start with other data than process 0 has, on a host that prepared its own.

    Raises:
        DataError: the digests differ.
    """
    found = data.facts.get("digest")
    first = processes.broadcast("data digest", lambda: found)
    if first != found:
        raise DataError(
            f"process {processes.index} has {data.facts['name']} with digest {found}, process 0 with {first}; "
            "copy the prepared data of one host to all, or set MUPAX_DATA to a folder that they share"
        )
