"""Command `mupax data tokenizer SOURCES --size N --out FILE`: train a tokenizer on one's own texts.

`sources/training_texts.py` reads the texts.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro import conf

from mupax import command_line, disk, terminal
from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig

if TYPE_CHECKING:
    from mupax.train.data.sources.training_texts import TrainingTexts


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Train a byte-level BPE tokenizer on texts and conversations, and write it as tokenizer.json.

    SOURCES are any texts that --data.name takes: text:PATH, records:PATH, chat:PATH, hf:NAME,
    python_corpus. Written as NAME=SOURCE:WEIGHT, each has its share of the training bytes, as in
    --data.mix. About 256 MiB at most of the training part of the texts are read. Use the file with
    `mupax train lm-tiny --data.tokenizer FILE`.
    """

    sources: Annotated[conf.Positional[tuple[str, ...]], conf.arg(metavar="SOURCES")]
    """Texts, or NAME=SOURCE:WEIGHT each."""
    size: Annotated[int, conf.arg(metavar="N")]
    """Tokens at most: the 256 bytes, the separator `<|endoftext|>` and the tokens of a chat
    template among them."""
    out: Annotated[str, conf.arg(metavar="FILE")]
    """The tokenizer.json to write; one that is there already is left alone."""
    field: str = "text"
    """Field or column of records that has the text."""
    chat_template: Annotated[str | None, conf.arg(metavar="FILE")] = None
    """Chat template (jinja2) for chat:PATH. Its special tokens, such as `<|im_end|>`, become
    single tokens of the tokenizer."""
    data_dir: str | None = None
    """Folder of prepared data sets (the user's cache unless given)."""
    on_broken: Literal["stop", "skip"] = "stop"
    """Treatment of a broken file or record: stop, or skip and count it."""
    limits: LimitsConfig = DEFAULT_LIMITS
    """Limits of files and records, as data.limits."""

    def run(self) -> int:
        """Train the tokenizer, write it, print how to use it and return 0.

        Raises:
            UsageError: --size is too small, --out is no new .json file, or SOURCES do not fit each
                other or --chat-template.
            ConfigError: --out is an address, such as gs://bucket/tokenizer.json, or its folder
                cannot be made, or a limit is less than 1.
            DataError: The sources have no text or cannot be read.
            DiskError: The file cannot be written.
        """
        from mupax.train.data.interface import with_flags_of

        with with_flags_of(self):
            return self._run()

    def _run(self) -> int:
        from mupax.train.config.checks import check_outputs
        from mupax.train.data.interface import DataError
        from mupax.train.data.text import named_tokenizers
        from mupax.train.data.text.tokenizer import SEPARATOR, Subwords

        if self.size < named_tokenizers.SMALLEST_BPE:
            least = named_tokenizers.SMALLEST_BPE
            raise command_line.UsageError(
                f"--size is {self.size}; write at least {least}, the bytes and a separator"
            )
        file = self._file()
        texts = self._texts()
        check_outputs(self, "out")

        documents = texts.read()
        # Without any text, the library would silently return a tokenizer of single bytes.
        first = next(documents, None)
        if first is None:
            raise DataError(f"{' '.join(self.sources)} has no text to train on; give more of it")
        all_documents = itertools.chain([first], documents)
        library = named_tokenizers.train_bpe(all_documents, self.size, texts.special)
        # The library's `save` refuses a path that is not UTF-8.
        disk.write_whole(file, library.to_str(pretty=True))

        for log in texts.broken:
            for line in log.summary():
                terminal.say(line)
        encoder = Subwords(file)
        special = ", ".join(dict.fromkeys((SEPARATOR, *texts.special)))
        terminal.say(
            f"{file} has {encoder.vocab_size:,} tokens, of which {special} stand for no text"
        )
        terminal.say("use it with")
        flags = f"--data.tokenizer {shlex.quote(self.out)} --model.vocab-size {encoder.vocab_size}"
        print(terminal.command(f"mupax train lm-tiny {self._data_flags()} {flags}"))
        return 0

    def _file(self) -> Path:
        """Return --out as a path, after a check that it is a new .json file on this machine.

        Raises:
            UsageError: The path has another suffix, or exists.
            ConfigError: The path is an address, such as gs://bucket/tokenizer.json.
        """
        from mupax.train.config.checks import check_local

        check_local("--out", self.out)
        file = Path(self.out)
        if file.suffix != ".json" or file.is_dir():
            raise command_line.UsageError(
                f"--out is {file}; write the path of a .json file, such as tokenizer.json"
            )
        if file.exists():
            raise command_line.UsageError(
                f"--out {file} is there already, and runs may use it; delete it, or write another path"
            )
        return file

    def _data_flags(self) -> str:
        """Return the flags with which `mupax train` trains on the sources, quoted for a shell.

        The command prints them as an example. With weights, the flags name all sources as a
        mixture. Without weights, they name the first source only.
        """
        if self._is_mixture():
            read = self.sources
            flags = ["--data.mix", *read]
        else:
            read = self.sources[:1]
            flags = ["--data.name", *read]
        if self.field != "text" and not read[0].startswith(("text:", "chat:")):
            flags += ["--data.field", self.field]
        if self.chat_template and any("chat:" in source for source in read):
            flags += ["--data.chat-template", self.chat_template]
        return shlex.join(flags)

    def _is_mixture(self) -> bool:
        """Return whether the sources have weights. Raise `UsageError` if only some have."""
        weighted = [word for word in self.sources if "=" in word.partition(":")[0]]
        if weighted and len(weighted) != len(self.sources):
            plain = next(word for word in self.sources if word not in weighted)
            raise command_line.UsageError(
                f"{weighted[0]} has a name and a weight, and {plain} has none; write all as NAME=SOURCE:WEIGHT, or none"
            )
        return bool(weighted)

    def _texts(self) -> TrainingTexts:
        """Return the training texts of all sources as one, interleaved by the sources' weights.

        Without weights each source is read once.

        Raises:
            UsageError: There is no source, only some have weights, or --chat-template does not fit
                the sources.
            DataError: A source cannot be read, or none reads one of the flags.
        """
        from mupax.train.config.data import DataConfig
        from mupax.train.data import mix
        from mupax.train.data.interface import DataError, refuse_unread_flags
        from mupax.train.data.sources import training_texts
        from mupax.zoo.configs import DecoderConfig

        if not self.sources:
            raise command_line.UsageError("this needs SOURCES, such as text:my_texts")
        words = self.sources
        weights = None
        if self._is_mixture():
            parts = mix.parts(words, "the source")
            weights = {name: part.count for name, part in parts.items()}
        else:
            # A source that is named twice counts once.
            parts = {source: mix.Part(source, 1) for source in dict.fromkeys(words)}
            words = [f"{i}={source}:1" for i, source in enumerate(parts)]
        kinds = {part.source.partition(":")[0] for part in parts.values()}
        if "chat" in kinds and self.chat_template is None:
            raise command_line.UsageError(
                "conversations are trained on as a chat template writes them; add --chat-template FILE, a template of jinja2"
            )
        if self.chat_template is not None and "chat" not in kinds:
            raise command_line.UsageError(
                "--chat-template is for a source chat:PATH, and none is given; leave it out"
            )
        refuse_unread_flags(self, [part.source for part in parts.values()])
        config = DataConfig(
            name=mix.NAME,
            mix=tuple(words),
            batch_size=1,
            field=self.field,
            chat_template=self.chat_template,
            data_dir=self.data_dir,
            on_broken=self.on_broken,
            limits=self.limits,
            tokenizer=f"bpe:{self.size}",
        )
        # Any text fits this model. The readers only ask for its kind.
        model = DecoderConfig(width=1, depth=1, num_heads=1, seq_len=1, vocab_size=2**31)
        texts = {}
        for name, part in parts.items():
            try:
                part_config = training_texts.part_config(config, part.source)
                texts[name] = training_texts.opened(part_config, model, terminal.say)
            except DataError as error:
                raise DataError(f"{name}: {error}" if weights else str(error)) from error
        return training_texts.weighted(texts, weights)
