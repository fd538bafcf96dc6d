"""Weights in the layout of Hugging Face's `transformers`: names and tensors of the families in `architectures`, both ways.

Ours are stacked over layers and keep heads apart; theirs are one matrix per layer, [out, in] but for GPT-2's, which are
[in, out] with query, key and value side by side. Names on disk have the prefix of the model with its head; files of
the bare model, without it, are read too. Only names and tensors here: multipliers are folded by whoever calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from mupax.zoo.configs import ViTConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface.architectures import Published
from mupax.zoo.huggingface.names import HEADS, family_of, tensors
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
"""Ends of names that files of older versions hold beside the weights: masks, tables, the token of another training task."""

POOLER = ("pooler.", "head.")
"""Layers after the bare ViT and SigLIP's vision tower that no classifier reads."""

NEOX_HEAD = "embed_out.weight"
"""What GPT-NeoX' files call its readout."""

COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names under which older files hold `shared.weight` again."""

REGISTERS = "registers"
"""Vectors of their own that theirs has for tokens that are rows of the positions in ours."""

_LARGEST_ZEROS = 2**28


class Loaded(NamedTuple):
    """Parameters read from a file, float32, and what was not read."""

    params: Params
    dropped: list[str]
    """Tensors of the file that no model here has, and that change no output."""
    zeros: list[str]
    """Parameters that are zero because the file does not hold them."""


def to_huggingface(
    model: TransformerConfig, params: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and tensors of a file, one by one.

    Args:
        model: the model, which `mupax.zoo.huggingface.config.to_huggingface` can say.
        params: our parameters as the plain network has them, multipliers folded. Gains and biases that the model
            does not have are written as ones and zeros, which is the same function.
    """
    family = family_of(model)
    prefix = PREFIX[family]
    if family == "dinov2_with_registers":
        params = _registers_apart(params, model)
    for tensor in tensors(model):
        for index in np.ndindex(tensor.sizes(model)):
            values = []
            for part in tensor.parts:
                value = params.get(part.name)
                absent = value is None
                values.append(
                    np.full(part.shape, part.name.endswith("gain"), np.float32)
                    if absent
                    else value[index]
                )
            name = tensor.named(index)
            name = NEOX_HEAD if prefix == "gpt_neox." and name == "lm_head.weight" else name
            yield (name if name in HEADS else prefix + name), tensor.theirs(values)
    if (
        prefix == "model." and model.denoises and not model.tied_readout
    ):  # later versions tie all tables or none
        yield from ((prefix + name, params["token"]) for name in COPIES)


def from_huggingface(files: Tensors, published: Published) -> Loaded:
    """Our parameters from a file of theirs.

    Args:
        files: its tensors.
        published: the model that its config.json describes.

    Raises:
        TensorFileError: a tensor that is missing, has another shape, or that this architecture does not have.
    """
    model, family = published.model, family_of(published.model)
    names_in_file = _without_prefix(files, PREFIX[family])
    # Before any loop over layers: a config may claim millions of them.
    most = max((tensor.sizes(model) for tensor in tensors(model)), key=math.prod)
    if math.prod(most) > len(names_in_file):
        claimed = " layers of ".join(map(str, most)) + (" experts" if most[1:] else " layers")
        raise TensorFileError(
            f"{files.path}: {len(names_in_file)} tensors cannot be the {claimed} of config.json"
        )
    zeros = set(published.zeros)
    if family == "mbart" and "final_logits_bias" not in names_in_file:
        zeros.add("readout_bias")
    if isinstance(model, ImageModel) and not any(
        name.startswith("classifier.") for name in names_in_file
    ):
        zeros |= {"readout", "readout_bias"}
        if (classes := model.sizes()["classes"]) * model.width > _LARGEST_ZEROS:
            raise TensorFileError(
                f"{files.path}: no classifier, and {classes} classes are too many to add"
            )
    if (
        family == "t5" and not model.tied_readout
    ):  # which a file leaves out where it is the embedding
        names_in_file.setdefault("lm_head.weight", names_in_file.get("shared.weight", ""))
    left = {name: file for name, file in names_in_file.items() if file in files.shapes}
    for tensor in tensors(model):  # every shape before any array is made
        if not zeros.issuperset(part.name for part in tensor.parts):
            for index in np.ndindex(tensor.sizes(model)):
                name, shape = tensor.named(index), tensor.shape
                if name not in left:
                    raise TensorFileError(f"{files.path}: the tensor {name} {shape} is missing")
                if (there := files.shapes[left.pop(name)]) != shape:
                    raise TensorFileError(
                        f"{files.path}: the tensor {name} has shape {there}; by config.json it would be {shape}"
                    )
    params: Params = {}
    for tensor in tensors(model):
        sizes = tensor.sizes(model)
        absent = zeros.issuperset(part.name for part in tensor.parts)
        make = np.zeros if absent else np.empty
        params |= {part.name: make(sizes + part.shape, np.float32) for part in tensor.parts}
        for index in () if absent else np.ndindex(sizes):
            value = files.read(names_in_file[tensor.named(index)])
            for part, values in zip(tensor.parts, tensor.ours(value), strict=True):
                params[part.name][index] = values
    if (registers := params.pop(REGISTERS, None)) is not None:
        _put_registers(params, registers, own_rows=family == "deit")
    for name in params.keys() - model.parameters().keys():
        value = params.pop(
            name
        )  # a key bias that softmax does not see: exactly the same function without
        if not name.endswith("key_bias") and value.any():
            raise TensorFileError(
                f"{files.path}: final_logits_bias is not zero, and our models have no such bias"
            )
    dropped = [
        name for name in sorted(left) if name.endswith(WITHOUT_MEANING) or name.startswith(POOLER)
    ]
    for copy in sorted(
        left.keys() & {*COPIES, *(["lm_head.weight"] if model.tied_readout else [])}
    ):
        name, token = names_in_file[copy], params["token"]
        if files.shapes[name] != token.shape or not np.array_equal(files.read(name), token):
            raise TensorFileError(
                f"{files.path}: config.json says that the readout is the embedding (tie_word_embeddings), and "
                "lm_head.weight differs from it; write tie_word_embeddings false to read it as its own matrix"
                if copy == "lm_head.weight"
                else f"{files.path}: {copy} differs from shared.weight, and by the architecture they are one table"
            )
        del left[copy]
        dropped += [copy] * (copy not in COPIES)
    if unknown := sorted(set(left) - set(dropped)):
        raise TensorFileError(
            f"{files.path}: {len(unknown)} tensors that a {family} of this config does not have, such as "
            f"{', '.join(ascii(name)[1:-1][:60] for name in unknown[:3])}; the model is another than config.json says"
        )
    if published.query_scale != 1:
        last = "query_norm.gain" if "block.attention.query_norm.gain" in params else "query"
        params[f"block.attention.{last}"] *= np.float32(published.query_scale)
    if published.embedding_scale != 1:
        _scale_embeddings(params, published.embedding_scale, tied=model.tied_readout is not None)
    return Loaded(params, dropped, sorted(zeros & set(params)))


def _registers_apart(params: Mapping[str, np.ndarray], model: TransformerConfig) -> Params:
    """Parameters whose rows of positions that are registers stand apart."""
    assert isinstance(model, ViTConfig)
    rows = slice(1, 1 + (model.registers or 0))
    return {
        **params,
        REGISTERS: params["position"][rows],
        "position": np.delete(params["position"], rows, 0),
    }


def _put_registers(params: Params, registers: np.ndarray, *, own_rows: bool) -> None:
    """Put registers into the positions, after the CLS token's row; own_rows: there are rows for them, which add to them."""
    rows, position = slice(1, 1 + len(registers)), params["position"]
    params["position"] = (
        position if own_rows else np.insert(position, [1] * len(registers), 0, axis=0)
    )
    params["position"][rows] += registers


def _scale_embeddings(params: Params, scale: float, *, tied: bool) -> None:
    """Put a factor of looked-up embeddings into their table; a readout that is this table has a smaller norm before it."""
    params["token"] = (params["token"] * np.float64(scale)).astype(np.float32)
    for name in ("norm.gain", "norm.bias") if tied else ():
        params[name] = (params[name] / np.float64(scale)).astype(np.float32)


def _without_prefix(files: Tensors, prefix: str) -> dict[str, str]:
    """Name without the prefix to name in the file."""
    names_in_file: dict[str, str] = {}
    for name in files.shapes:
        short = (
            "lm_head.weight"
            if name == NEOX_HEAD and prefix == "gpt_neox."
            else name.removeprefix(prefix)
        )
        if short in names_in_file:
            raise TensorFileError(
                f"{files.path}: holds both {names_in_file[short][:60]!a} and {name[:60]!a}, which are one tensor"
            )
        names_in_file[short] = name
    return names_in_file
