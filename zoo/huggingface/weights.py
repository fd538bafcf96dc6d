"""Weights in the layout of Hugging Face's `transformers`, both ways.

Our parameters are stacked over layers and keep heads apart. In the files every layer has matrices
of its own, [out, in]. Only GPT-2's are [in, out], with query, key and value side by side. Names in
a file begin with the prefix of the model with its head. Files of the bare model, whose names have
no prefix, are read too. Callers fold the preset's multipliers into the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from mupax.zoo.configs import ViTConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface.architectures import Family, Published
from mupax.zoo.huggingface.names import HEADS, Tensor, family_of, tensors
from mupax.zoo.huggingface.tables import PREFIX
from mupax.zoo.huggingface.tensorfile import TensorFileError, Tensors
from mupax.zoo.transformer import TransformerConfig

Params = dict[str, np.ndarray]

WITHOUT_MEANING = (
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
    "embeddings.mask_token",
)
"""Ends of the names of tensors in older files that are no weights of the model.

They are masks, tables of positions, and the token of another training task. A reader skips them.
"""

POOLER = ("pooler.", "head.")
"""Prefixes of layers after a ViT's or SigLIP's last block that a classifier does not read."""

LM_HEAD = "lm_head.weight"
"""Name of a language model's readout."""

NEOX_HEAD = "embed_out.weight"
"""Name of the readout in GPT-NeoX' files."""

COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names under which older files hold a copy of the token embedding `shared.weight`."""

REGISTERS = "registers"
"""Name of a ViT's register tokens while they are read or written as a parameter of their own.

In files they are tensors of their own. In our models they are rows of the parameter "position".
"""

_LARGEST_ZEROS = 2**28
"""Most entries of a classifier of zeros that is added to the parameters of a file without one."""


class Loaded(NamedTuple):
    """Parameters read from a file, float32, and what was not read."""

    params: Params
    dropped: list[str]
    """Tensors of the file that no model of ours has, and that change no output."""
    zeros: list[str]
    """Parameters that are zero because the file does not hold them."""


def to_huggingface(
    model: TransformerConfig, params: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and value of every tensor of a file in the layout of `transformers`.

    Args:
        model: Model that `mupax.zoo.huggingface.config.to_huggingface` does not refuse.
        params: Parameters of the plain network, with multipliers folded in. Gains and biases that
            the model does not have are written as ones and zeros, which is the same function.
    """
    family = family_of(model)
    prefix = PREFIX[family]
    if family == "dinov2_with_registers":
        params = _separate_registers(params, model)
    for tensor in tensors(model):
        for index in np.ndindex(tensor.sizes(model)):
            values = []
            for part in tensor.parts:
                if part.name in params:
                    values.append(params[part.name][index])
                else:
                    fill_value = 1 if part.name.endswith("gain") else 0
                    values.append(np.full(part.shape, fill_value, np.float32))
            name = tensor.named(index)
            # GPT-NeoX calls its readout by another name than all other families.
            if family == "gpt_neox" and name == LM_HEAD:
                name = NEOX_HEAD
            if name not in HEADS:
                name = prefix + name
            yield name, tensor.to_huggingface(values)
    if family == "mbart" and not model.tied_readout:
        # Newer versions of transformers tie all tables of an MBart or none, so an untied file holds
        # every copy of the token table.
        for name in COPIES:
            yield prefix + name, params["token"]


def from_huggingface(files: Tensors, published: Published) -> Loaded:
    """Read the parameters of our model from a file in the layout of `transformers`.

    The factors of `published` on queries and embeddings are multiplied into the parameters.

    Args:
        files: Tensors of the file, or of several files with an index.
        published: Model that the config.json beside the file describes.

    Raises:
        TensorFileError: A tensor is missing or has another shape, or the file has a tensor that the
            architecture does not have. Also if a bias that our model lacks is not zero, or a copy
            of the token embedding differs from it.
    """
    model = published.model
    family = family_of(model)
    names_in_file = _without_prefix(files, family)
    _check_number_of_layers(files, model, names_in_file)
    zeros = _zero_params(files, published, names_in_file)
    if family == "t5" and not model.tied_readout:
        # A file leaves the readout out if it is equal to the embedding.
        names_in_file.setdefault(LM_HEAD, names_in_file.get("shared.weight", ""))

    # All shapes are checked before any array is made.
    expected = _expected_names(files, model, names_in_file, zeros)
    params = _read_params(files, model, names_in_file, zeros)
    registers = params.pop(REGISTERS, None)
    if registers is not None:
        _put_registers(params, registers, own_rows=family == "deit")
    _drop_unused_biases(files, params, model)
    unread = [
        name
        for name, file in names_in_file.items()
        if file in files.shapes and name not in expected
    ]
    dropped = _check_unread(files, model, names_in_file, unread, params)

    if published.query_scale != 1:
        # A norm of queries cancels a factor on their matrix, so the factor goes into the gain of
        # the norm.
        has_query_norm = "block.attention.query_norm.gain" in params
        last = "query_norm.gain" if has_query_norm else "query"
        params[f"block.attention.{last}"] *= np.float32(published.query_scale)
    if published.embedding_scale != 1:
        _scale_embeddings(params, published.embedding_scale, tied=model.tied_readout is not None)
    return Loaded(params, dropped, sorted(zeros & set(params)))


def _without_prefix(files: Tensors, family: Family) -> dict[str, str]:
    """Return the full name of every tensor in the file, by its name without the family's prefix.

    Raises:
        TensorFileError: Two tensors have the same name without the prefix.
    """
    names_in_file: dict[str, str] = {}
    for name in files.shapes:
        if family == "gpt_neox" and name == NEOX_HEAD:
            short_name = LM_HEAD
        else:
            short_name = name.removeprefix(PREFIX[family])
        if short_name in names_in_file:
            raise TensorFileError(
                f"{files.path}: holds both {names_in_file[short_name][:60]!a} and {name[:60]!a}, "
                "which are one tensor"
            )
        names_in_file[short_name] = name
    return names_in_file


def _check_number_of_layers(
    files: Tensors, model: TransformerConfig, names_in_file: Mapping[str, str]
) -> None:
    """Raise an error if a config has more layers, or layers times experts, than the file tensors.

    This comes before any loop over layers, because a config may claim millions of them.

    Args:
        names_in_file: Name in the file by the name without the prefix.

    Raises:
        TensorFileError: The file has too few tensors.
    """
    largest = max((tensor.sizes(model) for tensor in tensors(model)), key=math.prod)
    if math.prod(largest) > len(names_in_file):
        # `largest` may be () if there is one layer, because () and (1,) have the same product.
        num_layers = largest[0] if largest else 1
        claimed = f"{num_layers} layers"
        if len(largest) == 2:
            claimed += f" of {largest[1]} experts"
        raise TensorFileError(
            f"{files.path}: {len(names_in_file)} tensors cannot be the {claimed} of config.json"
        )


def _zero_params(
    files: Tensors, published: Published, names_in_file: Mapping[str, str]
) -> set[str]:
    """Return the names of the parameters that are zero because the file does not hold them.

    Args:
        names_in_file: Name in the file by the name without the prefix.

    Raises:
        TensorFileError: The file has no classifier, and the config has too many classes to add one.
    """
    model = published.model
    zeros = set(published.zeros)
    if family_of(model) == "mbart" and "final_logits_bias" not in names_in_file:
        # MBart's bias of logits is a buffer of zeros, which files may leave out.
        zeros.add("readout_bias")
    if not isinstance(model, ImageModel):
        return zeros
    if not any(name.startswith("classifier.") for name in names_in_file):
        zeros |= {"readout", "readout_bias"}
        num_classes = model.sizes()["classes"]
        # A config may claim any number of classes, and zeros would fill the memory.
        if num_classes * model.width > _LARGEST_ZEROS:
            raise TensorFileError(
                f"{files.path}: no classifier, and {num_classes} classes are too many to add"
            )
    return zeros


def _is_zero(tensor: Tensor, zeros: set[str]) -> bool:
    """Return whether all parts of a tensor are in `zeros`.

    Args:
        zeros: Names of the parameters that are zero because the file does not hold them.
    """
    return zeros.issuperset(part.name for part in tensor.parts)


def _expected_names(
    files: Tensors, model: TransformerConfig, names_in_file: Mapping[str, str], zeros: set[str]
) -> set[str]:
    """Check the shapes of the tensors to read. Return their names without the prefix.

    Args:
        names_in_file: Name in the file by the name without the prefix.
        zeros: Parameters that are zero because the file does not hold them. Their tensors are
            neither checked nor returned.

    Raises:
        TensorFileError: A tensor is missing or has another shape than config.json says.
    """
    expected = set()
    for tensor in tensors(model):
        if _is_zero(tensor, zeros):
            continue
        shape = tensor.shape
        for index in np.ndindex(tensor.sizes(model)):
            name = tensor.named(index)
            name_in_file = names_in_file.get(name)
            if name_in_file not in files.shapes:
                raise TensorFileError(f"{files.path}: the tensor {name} {shape} is missing")
            shape_in_file = files.shapes[name_in_file]
            if shape_in_file != shape:
                raise TensorFileError(
                    f"{files.path}: the tensor {name} has shape {shape_in_file}; "
                    f"by config.json it would be {shape}"
                )
            expected.add(name)
    return expected


def _read_params(
    files: Tensors, model: TransformerConfig, names_in_file: Mapping[str, str], zeros: set[str]
) -> Params:
    """Read our parameters, stacked over layers. Those in `zeros` are filled with zeros.

    The arrays are float32. Registers are still apart from the positions.

    Args:
        names_in_file: Name in the file by the name without the prefix.
    """
    params: Params = {}
    for tensor in tensors(model):
        sizes = tensor.sizes(model)
        if _is_zero(tensor, zeros):
            for part in tensor.parts:
                params[part.name] = np.zeros(sizes + part.shape, np.float32)
            continue
        # One layer is read at a time, into arrays that have all layers.
        for part in tensor.parts:
            params[part.name] = np.empty(sizes + part.shape, np.float32)
        for index in np.ndindex(sizes):
            value = files.read(names_in_file[tensor.named(index)])
            part_values = tensor.from_huggingface(value)
            for part, part_value in zip(tensor.parts, part_values, strict=True):
                params[part.name][index] = part_value
    return params


def _drop_unused_biases(files: Tensors, params: Params, model: TransformerConfig) -> None:
    """Remove biases that our model does not have from `params`, in place.

    These are key biases, which change no output, and biases of zeros.

    Raises:
        TensorFileError: Another bias is not zero.
    """
    for name in params.keys() - model.parameters().keys():
        value = params.pop(name)
        # Our models lack a key bias only where softmax cancels it, so it may be dropped whatever
        # its values.
        if not name.endswith("key_bias") and value.any():
            raise TensorFileError(
                f"{files.path}: the values of {name} are not zero, and our models have no such bias"
            )


def _check_unread(
    files: Tensors,
    model: TransformerConfig,
    names_in_file: Mapping[str, str],
    unread: list[str],
    params: Params,
) -> list[str]:
    """Return the names of unread tensors that may be dropped, because they change no output.

    These are tensors without meaning for the model, and a tied readout that the file also holds as
    a tensor. Copies of the token embedding, of which the readout is one, are compared with it.

    Args:
        files: Tensors of the file, for the values of copies.
        names_in_file: Name in the file by the name without the prefix.
        unread: Names without the prefix of the tensors that were not read.
        params: Parameters that were read, for comparison with copies.

    Raises:
        TensorFileError: A copy differs from the embedding, or a tensor is unknown.
    """
    dropped = [
        name for name in sorted(unread) if name.endswith(WITHOUT_MEANING) or name.startswith(POOLER)
    ]
    # A model of images has no token embedding, and so no copies of one.
    copies: set[str] = set()
    if "token" in params:
        copies.update(COPIES)
    if model.tied_readout:
        copies.add(LM_HEAD)
    unread_copies = sorted(copies.intersection(unread))
    for copy in unread_copies:
        name = names_in_file[copy]
        token = params["token"]
        if files.shapes[name] != token.shape or not np.array_equal(files.read(name), token):
            if copy == LM_HEAD:
                raise TensorFileError(
                    f"{files.path}: config.json says that the readout is the embedding "
                    "(tie_word_embeddings), and lm_head.weight differs from it; "
                    "write tie_word_embeddings false to read it as its own matrix"
                )
            raise TensorFileError(
                f"{files.path}: {copy} differs from shared.weight, "
                "and by the architecture they are one table"
            )
        if copy == LM_HEAD:
            dropped.append(copy)

    unknown = sorted(set(unread) - set(dropped) - set(unread_copies))
    if unknown:
        # Tensor names are untrusted: control characters are escaped and long names cut.
        shown_names = [ascii(name)[1:-1][:60] for name in unknown[:3]]
        raise TensorFileError(
            f"{files.path}: {len(unknown)} tensors that a {family_of(model)} of this config does "
            f"not have, such as {', '.join(shown_names)}; "
            "the model is another than config.json says"
        )
    return dropped


def _separate_registers(params: Mapping[str, np.ndarray], model: TransformerConfig) -> Params:
    """Return the parameters with the rows of a ViT's registers moved out of "position".

    The rows become a parameter of their own, `REGISTERS`. The given mapping is not changed.
    """
    assert isinstance(model, ViTConfig)
    # Row 0 of the positions is that of the CLS token.
    rows = slice(1, 1 + (model.registers or 0))
    position = params["position"]
    return {**params, REGISTERS: position[rows], "position": np.delete(position, rows, 0)}


def _put_registers(params: Params, registers: np.ndarray, *, own_rows: bool) -> None:
    """Add a ViT's register tokens to "position", in the rows after that of the CLS token.

    Args:
        params: Parameters with "position", which is changed in place.
        registers: Vectors of the registers, [registers, D].
        own_rows: `True` if "position" has rows for the registers already, as in DeiT. `False`
            inserts the rows.
    """
    count = len(registers)
    if not own_rows:
        params["position"] = np.insert(params["position"], [1] * count, 0, axis=0)
    params["position"][1 : 1 + count] += registers


def _scale_embeddings(params: Params, scale: float, *, tied: bool) -> None:
    """Multiply the token embeddings by the factor that `transformers` applies to looked-up rows.

    Args:
        params: Parameters with "token" and the last norm, which are changed in place.
        tied: Whether the table is also the readout, to which the factor does not apply. The norm
            before the readout is then divided by `scale`.
    """
    # Rounded to float32 once, after a product in float64.
    params["token"] = (params["token"] * np.float64(scale)).astype(np.float32)
    if tied:
        for name in ("norm.gain", "norm.bias"):
            params[name] = (params[name] / np.float64(scale)).astype(np.float32)
