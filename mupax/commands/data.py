"""`mupax data prepare NAME`: write a data set to disk, or tokenize a text, before a run needs it.

A run prepares small data sets by itself. Large data sets are better prepared once, by hand.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from tyro import conf

from mupax import terminal
from mupax.command_line import UsageError
from mupax.disk import lasting_name
from mupax.mappings import function_of
from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig
from mupax.train.data import DataError
from mupax.train.data.interface import changed_flags, with_flags_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """Write a data set as array_record, or tokenize a text."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="NAME")]
    """python_corpus, digits, cifar5m, imagenet2012 or any other TFDS name; text:PATH or
    records:PATH; or a data set of your own (--plugin MODULE)."""
    data_dir: str | None = None
    """Folder of prepared data sets; not of text:PATH and records:PATH. The default is in the user's
    cache."""
    tokenizer: str = "bytes"
    """Tokenizer of text:PATH and records:PATH, as data.tokenizer."""
    separator: str | None = None
    """Token that ends every document of text:PATH and records:PATH, as data.separator."""
    special_tokens: Literal["parse", "text"] = "parse"
    """Treatment of special tokens quoted in text:PATH and records:PATH, as data.special_tokens."""
    field: str = "text"
    """Field or column of records:PATH that has the text."""
    on_broken: Literal["stop", "skip"] = "stop"
    """Treatment of a broken file or record in text:PATH and records:PATH: stop, or skip and count
    it."""
    limits: LimitsConfig = DEFAULT_LIMITS
    """Limits of text:PATH and records:PATH, as data.limits."""

    def run(self) -> int:
        """Prepare the data set and print its folder or its number of tokens.

        Return exit code 0, or 1 if TFDS could not prepare it. A data set without a step of
        preparation is only reported.

        Raises:
            UsageError: `data_dir` is set, and the name is text:PATH or records:PATH, or a flag of
                those is set, and the name is neither.
            ConfigError: A limit is less than 1.
            DataError: The data is missing or damaged, or a flag does not fit it.
        """
        with with_flags_of(self):
            return self._run()

    def _run(self) -> int:
        from mupax.train.config.data import fields_of_kinds, source, source_key, unread_fields
        from mupax.train.data import cache

        if self.name.startswith(("text:", "records:")):
            if self.data_dir is not None:
                raise UsageError(
                    f"--data-dir is of prepared data sets, and {self.name} is none; its tokens are "
                    "written to the cache, which the environment variable MUPAX_DATA names"
                )
            return self._tokenize()
        # Only `_tokenize` reads the other flags.
        for flag in changed_flags(self, fields_of_kinds() - {"data_dir"}):
            raise UsageError(
                f"{flag} is of text:PATH and records:PATH, which this command tokenizes, and "
                f"{self.name} is neither; leave it out"
            )
        for flag in changed_flags(self, unread_fields([self.name])):
            raise UsageError(f"{flag} is not read with the data {self.name}; leave it out")
        if source_key(self.name) is None:
            return _prepare_published(self.name, self.data_dir)
        prepare = source(self.name).prepare
        if prepare is None:
            terminal.say(f"{self.name} is read as a run starts; there is nothing to prepare")
            return 0
        function_of(prepare)(self.data_dir, print)
        terminal.say(f"{self.name} is prepared in {cache.data_sets(self.data_dir)}")
        return 0

    def _tokenize(self) -> int:
        """Tokenize a user's text into the cache, where a run with these settings finds the tokens.

        Print the numbers of training and evaluation tokens, and return exit code 0.
        """
        from mupax.train.config.data import DataConfig
        from mupax.train.data import load
        from mupax.zoo.configs import DecoderConfig

        config = DataConfig(
            name=self.name,
            # Any number will do, because only the tokens are written.
            batch_size=1,
            tokenizer=self.tokenizer,
            separator=self.separator,
            special_tokens=self.special_tokens,
            field=self.field,
            on_broken=self.on_broken,
            limits=self.limits,
        )
        # `load` refuses a tokenizer that is larger than a model's vocabulary.
        model = DecoderConfig(width=1, depth=1, num_heads=1, seq_len=1, vocab_size=2**31)
        facts = load(config, model, seed=0).facts
        training = f"{facts['train_tokens']:,} training"
        evaluation = f"{facts['eval_tokens']:,} evaluation"
        terminal.say(f"{self.name} is prepared: {training} and {evaluation} tokens")
        return 0


def _prepare_published(name: str, data_dir: str | None) -> int:
    """Download and write a data set of TFDS. Return exit code 0, or 1 after printing the error.

    A lock lets one process at a time prepare the data set. What an interrupted preparation left
    is deleted first.

    Args:
        data_dir: Folder of prepared data sets. `None` is the user's cache.

    Raises:
        DataError: TFDS has no data set of this name.
    """
    from mupax.train.data import cache
    from mupax.train.data.sources import published

    base = cache.data_sets(data_dir)
    dataset = name.partition(":")[0].partition("/")[0]
    if dataset not in published.builder_names():
        raise DataError(published.unknown(name, base))
    cache.folder(base)
    import tensorflow_datasets as tfds

    from mupax.train.data.records import builders

    # TFDS would import any module that features.json of an earlier preparation names.
    for file in sorted((base / dataset).rglob("features.json")):
        builders.check_features(file)

    if dataset == "c4":
        import tensorflow_datasets.text.c4  # registers c4, which TFDS does not do by itself
    try:
        full: Any = published.CONFIGS.get(name, name)
        # TFDS reads array_record without TensorFlow.
        builder = tfds.builder(
            full, data_dir=lasting_name(base), file_format="array_record", try_gcs=False
        )
        _check_hosts(builder, base)
        with cache.lock(base, dataset, terminal.note):
            # Under the lock: without it, the folder could be the work of another process.
            cache.delete_incomplete(Path(builder.data_path))
            builder.download_and_prepare(file_format="array_record")
    except (Exception, SystemExit) as error:  # a data set's own code may raise anything
        lines = [line for line in str(error).splitlines() if line.strip()]
        head = f"error: TFDS could not prepare {name}: {type(error).__name__}"
        print(head, *lines[:5], sep="\n  ", file=sys.stderr)
        terminal.note(_advice(error))
        return 1

    # `builder.data_dir` may be a stand-in for a folder with an unusual name. Print the real one.
    folder = base / builder.data_path.relative_to(builder.data_dir)
    terminal.say(f"{name} is prepared in {folder}")
    return 0


def _check_hosts(builder: Any, base: Path) -> None:
    """Connect to every host that data must be downloaded from, to see that it can be reached.

    Nothing is checked if the data is prepared, if files were downloaded before, or with a proxy.

    Args:
        base: Folder of prepared data sets. Files in its `downloads` were downloaded before.

    Raises:
        OSError: A host cannot be reached within 10 seconds.
    """
    # TFDS itself would try for minutes. Through a proxy, hosts cannot be tested this way.
    has_downloads = any(path.is_file() for path in (base / "downloads").rglob("*"))
    # Files that an earlier try has downloaded need no host.
    if has_downloads or builder.is_prepared() or urllib.request.getproxies():
        return
    for host in sorted({urlsplit(url).hostname for url in builder.url_infos} - {None}):
        try:
            socket.create_connection((host, 443), timeout=10).close()
        except OSError as error:
            raise OSError(f"{host} cannot be reached: {error}") from error


def _advice(error: BaseException) -> str:
    """Return a sentence with advice for an error of TFDS, such as a package to install."""
    text = f"{type(error).__name__} {error}".lower()
    if "tensorflow" in text and isinstance(error, ImportError):
        return (
            "This data set is made with TensorFlow: install tensorflow-cpu to prepare it; training "
            "needs none."
        )
    if "beam" in text:
        return (
            "This data set is made with Apache Beam: install apache-beam to prepare it; training "
            "needs none. C4 need not be prepared: write --data.name hf:allenai/c4:en, which "
            "streams it."
        )
    if "cannot be reached" in text:
        return (
            "Run this where there is a network and copy the prepared folder, or set --data-dir to "
            "one that has it."
        )
    if "manual" in text:  # TFDS names the files that a user has to download
        return "Put the files it names where it says, and run this again."
    return (
        "See https://www.tensorflow.org/datasets/catalog for what it needs; the error was "
        f"{type(error).__name__}."
    )
