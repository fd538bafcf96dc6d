"""Exit code, first line, findings and consequences of `verify` agree for any dump."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets.verify.reference import ORDER
from tests.presets.verify.dumps import Contents, changed, decoder, dump, verified
from tests.presets.verify.test_right import grown

pytestmark = pytest.mark.core

QUERIES = [
    ("attn.q_proj", "attn.k_proj"),
    ("attn_q", "attn_k"),
    ("attn.w1", "attn.w2"),
    ("mixer.left", "mixer.right"),
]
"""Names of queries and keys: known, unknown, and taken for an MLP's."""


def network(
    width: int, layers: int = 2, query: str = "attn.q_proj", key: str = "attn.k_proj", **model: Any
) -> Contents:
    """Return a muP decoder in PyTorch's names, relative to width 64, with fixed heads."""
    times = width / 64
    rate = 6e-4

    def entry(shape: list[int], std: float, lr: float = 1.0, multiplier: float = 1.0) -> Contents:
        return {
            "shape": shape,
            "std": std,
            "lr": lr * rate,
            "wd": 0.0,
            "eps": 1e-8 / times,
            "multiplier": multiplier,
        }

    def matrix(shape: list[int]) -> Contents:
        return entry(shape, shape[1] ** -0.5, 1 / times)

    contents = {"wte.weight": entry([256, width], 0.5)}
    for layer in range(layers):
        for name in (query, key, "attn.v_proj", "attn.o_proj"):
            contents[f"h.{layer}.{name}.weight"] = matrix([width, width])
        contents[f"h.{layer}.mlp.c_fc.weight"] = matrix([4 * width, width])
        contents[f"h.{layer}.mlp.c_proj.weight"] = matrix([width, 4 * width])
        contents[f"h.{layer}.ln_1.weight"] = {"shape": [width], "lr": rate}
    contents["lm_head.weight"] = entry([256, width], 0.125, multiplier=1 / times)
    about = {"optimizer": "adam", "head_dim": width // 4, "attention": 16 / width, "branch": 1.0}
    return {**contents, "model": {**about, **model}}


def shown(
    capsys: pytest.CaptureFixture[str], folder: Path, *files: Contents, flags: tuple[str, ...] = ()
) -> Any:
    """Return the exit code of `verify` and what it prints, in one line."""
    paths = [folder / f"{index}.json" for index in range(len(files))]
    for path, contents in zip(paths, files, strict=True):
        path.write_text(json.dumps(contents))
    capsys.readouterr()
    code = main(["verify", *map(str, paths), *flags])
    streams = capsys.readouterr()
    return code, " ".join((streams.out + streams.err).split())


@pytest.mark.parametrize(("query", "key"), QUERIES)
def test_attention_by_the_root_is_wrong_whatever_queries_are_called(
    query: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    right = [network(width, query=query, key=key) for width in (64, 256)]
    code, text = shown(capsys, tmp_path, *right)
    assert code == 0
    assert text.startswith("RIGHT: ")
    root = [
        network(width, query=query, key=key, attention=(width / 4) ** -0.5) for width in (64, 256)
    ]
    code, text = shown(capsys, tmp_path, *root)
    assert code == 1
    assert text.startswith("WRONG: 1 wrong")
    assert "attention logits: the forward multiplier falls as width^-0.5" in text


@pytest.mark.parametrize("without", [(), ("lr",)])
def test_attention_by_the_root_is_a_caution_under_any_preset_that_has_it(
    without: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = decoder(16)
    files = [
        dump(presets.get("mup-half"), model, base) for model in (base, grown(base, "head_dim"))
    ]
    files = [
        {name: {k: v for k, v in e.items() if k not in without} for name, e in x.items()}
        for x in files
    ]
    for flags in ((), ("--preset", "mup-half")):
        code, text = shown(capsys, tmp_path, *files, flags=flags)
        assert code == 0
        assert text.startswith("RIGHT, with a caution: 0 wrong, 1 to know of")
        assert "caution attention logits" in text
        assert ("and those of the files do." in text) == (not without)
        assert ("the files do not say" in text) == bool(without)


def test_attention_at_a_fixed_head_is_of_no_concern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, text = shown(
        capsys, tmp_path, *(network(width, head_dim=16, attention=0.25) for width in (64, 256))
    )
    assert code == 0
    assert "attention logits" not in text


def test_names_that_were_taken_for_hidden_matrices_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, text = shown(
        capsys, tmp_path, *(network(width, query="attn_q", key="attn_k") for width in (64, 256))
    )
    assert (
        "note: taken for hidden matrices by their shapes, as their names say nothing: h.*.attn_q.weight, h.*.attn_k.weight"
        in text
    )
    assert "--role 'h.*.attn_q.weight=query'" in text
    _, text = shown(capsys, tmp_path, *(network(width) for width in (64, 256)))
    assert "taken for" not in text


def test_attention_without_a_name_or_a_head_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    names = {"query": "left", "key": "right"}
    files = [network(width, **names) for width in (64, 256)]
    files = [
        {n.replace("v_proj", "third").replace("o_proj", "fourth"): e for n, e in x.items()}
        for x in files
    ]
    assert shown(capsys, tmp_path, *files)[0] == 0
    bare = [{**x, "model": {k: v for k, v in x["model"].items() if k != "head_dim"}} for x in files]
    code, text = shown(capsys, tmp_path, *bare)
    assert code == 2
    assert "write --head-dim 64" in text


@pytest.mark.parametrize("layers", [1, 3, 12])
@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_an_overwritten_scheduler_is_named_with_any_number_of_layers(
    layers: int, noise: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    random = Random(0)

    def one_rate(name: str, entry: Contents) -> Contents:
        return {"lr": 6e-4 * (1 + noise * random.random())}

    _, text = shown(
        capsys, tmp_path, *(changed(network(width, layers), one_rate) for width in (64, 256))
    )
    assert (
        "a scheduler that sets the rate of all groups to its own undoes those of the groups" in text
    )
    _, text = shown(capsys, tmp_path, *(network(width, layers) for width in (64, 256)))
    assert "scheduler" not in text


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_readout_that_starts_too_small_is_one_caution(
    optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = decoder(16)
    files = [
        dump(presets.get("mup"), model, base, optimizer) for model in (base, grown(base, "heads"))
    ]
    files[1]["readout"]["std"] /= 4
    code, text = shown(capsys, tmp_path, *files)
    assert code == 0
    assert text.startswith("RIGHT, with a caution: 0 wrong, 1 to know of")
    assert "the logits start width^-1 smaller than they should" in text
    assert "training recovers" in text
    assert "explode" not in text
    files[1]["readout"]["lr"] /= 16 if optimizer == "sgd" else 4
    code, text = shown(capsys, tmp_path, *files)
    assert code == 1


TABLE = "wte.weight"


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            TABLE,
            [256],
            "wte.weight has the shape [256, 64] in 0.json and [256] in 1.json, which is another number",
        ),
        (
            TABLE,
            [256, 128],
            "wte.weight has the shape [256, 64] in 0.json and [256, 128] in 1.json, and no parameter",
        ),
        (
            TABLE,
            [256, 64],
            "wte.weight has the shape [256, 64] in 0.json and [256, 64] in 1.json, and no parameter",
        ),
        (
            "lm_head.weight",
            [256, 256, 1],
            "lm_head.weight has the shape [256, 64] in 0.json and [256, 256, 1]",
        ),
        (
            "h.{}.attn.v_proj.weight",
            [128, 256],
            "h.*.attn.v_proj.weight has the shape [64, 64] in 0.json and [128",
        ),
        (
            "h.{}.ln_1.weight",
            [64],
            "h.*.ln_1.weight has the shape [64] in 0.json and [64] in 1.json: it is 1 times",
        ),
        (
            "h.{}.mlp.c_proj.weight",
            [256, 512],
            "h.*.mlp.c_fc.weight has the shape [256, 64] in 0.json and [1024, 256]",
        ),
    ],
)
def test_shapes_that_are_of_no_one_model_are_refused(
    name: str, shape: list[int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    small = network(64)
    large = network(256)
    for layer in range(2):
        large[name.format(layer)]["shape"] = shape
    code, text = shown(capsys, tmp_path, small, large)
    assert code == 2
    assert words in text
    assert "write" in text


def test_a_vocabulary_that_was_padded_is_no_other_shape(tmp_path: Path):
    small = network(64)
    large = network(256)
    for name in (TABLE, "lm_head.weight"):
        large[name]["shape"] = [320, 256]
    assert verified(tmp_path, small, large)[0] == 0


@pytest.mark.parametrize("axis", ["heads", "head_dim"])
@pytest.mark.parametrize("without", [(), ("eps",), ("eps", "wd", "lr"), ("std",)])
def test_of_presets_that_fit_equally_well_mup_is_first(
    axis: str, without: tuple[str, ...], tmp_path: Path
):
    base = decoder(16)
    files = [dump(presets.get("mup"), model, base) for model in (base, grown(base, axis))]
    files = [
        {name: {k: v for k, v in e.items() if k not in without} for name, e in x.items()}
        for x in files
    ]
    assert verified(tmp_path, *files)[1]["lines"][0]["reference"] == "mup"


def anything(random: Random) -> tuple[list[Contents], tuple[str, ...]]:
    """Return dumps at two sizes with wrong numbers at random, and flags."""
    name, constants = random.choice([*ORDER, ("sp", {}), ("mup", {}), ("mup", {})])
    preset = presets.get(name, **dict(constants))
    tied = random.random() < 0.2
    optimizer = random.choice(preset.optimizers)
    base = decoder(16, tied=tied and name in ("mup", "sp"))
    larger = grown(base, random.choice(["heads", "head_dim", "depth"]))
    files = [dump(preset, model, base, optimizer) for model in (base, larger)]
    names = [n for n in files[0] if n != "model"]
    for _ in range(random.choice([0, 1, 1, 2, 4])):
        column = random.choice(["std", "lr", "eps", "wd", "multiplier"])
        factor = 4.0 ** random.choice([-2, -1, -0.5, 0.5, 1, 2])
        for parameter in random.sample(names, random.choice([1, 1, 3, len(names)])):
            files[1][parameter][column] *= factor
    if random.random() < 0.3:
        files[1]["model"][random.choice(["attention", "branch"])] *= 4.0 ** random.choice(
            [-1, -0.5, 0.5, 1]
        )
    if random.random() < 0.2:
        files = [changed(x, lambda n, e: {"std": 0.0} if n == "readout" else None) for x in files]
    return files, ("--preset", name) if random.random() < 0.3 else ()


@pytest.mark.parametrize("seed", range(4))
def test_exit_code_verdict_and_consequences_agree_for_any_dump(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    random = Random(seed)
    verdicts = set[str]()
    for _ in range(8):
        files, flags = anything(random)
        code, text = shown(capsys, tmp_path, *files, flags=flags)
        assert code in (0, 1), text
        _, report = verified(tmp_path, *files, flags=flags)
        (line,) = report["lines"]
        verdict = line["verdict"]
        limits = line["limits"]
        severities = {finding["severity"] for finding in line["findings"]}
        verdicts.add(verdict)
        assert (verdict == "wrong") == (code == 1) == ("fault" in severities), text
        assert (verdict == "right") == (not severities), text
        head = {"wrong": "WRONG: ", "caution": "RIGHT, with a caution: ", "right": "RIGHT: "}[
            verdict
        ]
        assert text.startswith(head), text
        if verdict != "wrong":
            assert "explode" not in text, text
            assert not any(entry["verdict"] in ("explodes", "lazy") for entry in limits.values()), (
                text
            )
        if verdict == "right":
            assert not limits, text
    assert len(verdicts) > 1  # the dumps are not all alike


EMBEDDINGS = [
    "wte",
    "embedding",
    "emb",
    "src_embedding",
    "bert.embeddings.token_type_embeddings",
    "value_embeds.0",
    "y_embedder.embedding_table",
]
"""Names of a table of embeddings, known ones and such as only say that they embed something."""


def renamed(contents: Contents, old: str, new: str) -> Contents:
    """Return a dump in which one parameter has another name."""
    return {new if name == old else name: entry for name, entry in contents.items()}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_table_of_embeddings_is_no_readout_whatever_it_is_called(name: str, tmp_path: Path):
    files = [renamed(network(width), "wte.weight", f"{name}.weight") for width in (64, 256)]
    code, report = verified(tmp_path, *files)
    assert (code, report["lines"][0]["verdict"], report["guessed"]) == (0, "right", {})
    files[1][f"{name}.weight"]["lr"] /= 4
    code, report = verified(tmp_path, *files)
    (finding,) = report["lines"][0]["findings"]
    assert (code, finding["names"], finding["role"]) == (1, [f"{name}.weight"], "token_embedding")


def test_a_matrix_that_is_called_an_embedding_is_told_by_its_shapes(tmp_path: Path):
    files = []
    for width in (64, 256):
        contents = network(width)
        matrix = {"shape": [width, 12], "std": 0.3, "lr": 6e-4, "wd": 0.0, "eps": 1e-8}
        files.append({
            "embed.weight": matrix,
            "time_embed.2.weight": {**matrix, "shape": [width, width], "std": width**-0.5,
                                    "lr": 6e-4 * 64 / width, "eps": 1e-8 * 64 / width},
            "time_embed.2.bias": {"shape": [width], "lr": 6e-4},
            **contents,
        })  # fmt: skip
    code, report = verified(tmp_path, *files)
    assert code == 0
    assert report["guessed"] == {"embed.weight": "patch_embedding", "time_embed.2.weight": "hidden"}


def test_a_linear_probe_is_a_readout_and_a_probe_of_a_pooling_head_is_a_vector(tmp_path: Path):
    files = []
    for width in (64, 256):
        contents = network(width)
        contents["probe.weight"] = {**contents["lm_head.weight"], "shape": [10, width]}
        contents["pool.probe"] = {**contents["wte.weight"], "shape": [1, width]}
        files.append(contents)
    code, report = verified(tmp_path, *files)
    assert (code, report["guessed"]) == (0, {"probe.weight": "readout"})
    files[1]["probe.weight"]["multiplier"] = 1.0
    assert verified(tmp_path, *files)[0] == 1  # the control: without the multiplier of a readout


def test_low_rank_adapters_are_not_judged(tmp_path: Path):
    files = []
    for width in (64, 256):
        adapter = {"std": 0.02, "lr": 6e-4, "wd": 0.0, "eps": 1e-8}
        files.append({
            "h.0.attn.q_proj.lora_A.default.weight": {**adapter, "shape": [8, width]},
            "h.0.attn.q_proj.lora_B.default.weight": {**adapter, "shape": [width, 8]},
            **network(width),
        })  # fmt: skip
    code, report = verified(tmp_path, *files)
    assert (code, report["lines"][0]["verdict"], report["guessed"]) == (0, "right", {})
    files[1]["h.0.attn.q_proj.weight"]["lr"] *= 4
    assert verified(tmp_path, *files)[0] == 1  # the control: the matrix that they adapt


@pytest.mark.parametrize("layout", ["out, in", "none"])
def test_the_second_factor_of_a_table_is_no_table(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = []
    for width in (64, 256):
        contents = network(width)
        values = contents.pop("wte.weight")
        name = "tok_embeddings_proj.weight" if layout == "out, in" else "tok_embeddings_proj"
        shape = [width, 12] if layout == "out, in" else [12, width]
        files.append(
            {
                "wte.weight": {**values, "shape": [256, 12]},
                name: {**values, "shape": shape},
                **contents,
            }
        )
    code, text = shown(capsys, tmp_path, *files)
    assert code == 2
    if layout == "none":
        # Without a layout nothing shows which dimension it reads.
        assert "nothing says what tok_embeddings_proj is; write --role" in text
        return
    assert "wte.weight has the shape [256, 12]" in text
    assert "leave it out by --role 'wte.weight=none'" in text
    _, text = shown(capsys, tmp_path, *files, flags=("--role", "wte.weight=none"))
    assert "taken for patch_embedding by their shapes, as their names say nothing: tok_emb" in text


def test_a_norm_beside_the_matrix_that_embeds_patches_is_a_norm(tmp_path: Path):
    """As in lucidrains' ViT, whose first module is a Sequential."""
    files = []
    for width in (64, 256):
        contents = network(width)
        del contents["wte.weight"]
        files.append({
            "to_patch_embedding.1.weight": {"shape": [48], "lr": 6e-4},
            "to_patch_embedding.2.weight": {"shape": [width, 48], "std": 0.14, "lr": 6e-4},
            "to_patch_embedding.3.weight": {"shape": [width], "lr": 6e-4},
            **contents,
        })  # fmt: skip
    code, report = verified(tmp_path, *files)
    assert code == 0
    assert report["guessed"] == {
        "to_patch_embedding.1.weight": "norm_gain",
        "to_patch_embedding.2.weight": "patch_embedding",
        "to_patch_embedding.3.weight": "norm_gain",
    }


def test_a_bias_of_a_hidden_matrix_in_a_block_is_judged_as_a_vector(tmp_path: Path):
    """Such as those of torchvision's `mlp.0`, whose name says nothing."""
    files = []
    for width in (64, 256):
        contents = network(width)
        for layer in range(2):
            contents[f"h.{layer}.mlp.0.weight"] = contents.pop(f"h.{layer}.mlp.c_fc.weight")
            bias = {"shape": [4 * width], "lr": 6e-4, "eps": 1e-8 * 64 / width}
            contents[f"h.{layer}.mlp.0.bias"] = bias
        files.append(contents)
    assert verified(tmp_path, *files)[0] == 0
    for layer in range(2):
        files[1][f"h.{layer}.mlp.0.bias"]["lr"] /= 4
    code, report = verified(tmp_path, *files)
    (finding,) = [f for f in report["lines"][0]["findings"] if f["severity"] == "fault"]
    assert (code, finding["names"]) == (1, ["h.*.mlp.0.bias"])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_fused_matrix_shows_its_key_heads_beside_what_reads_the_heads(
    kv_heads: int, tmp_path: Path
):
    """Heads of 16 grow from 4 to 16, or stay 8 in a model that is narrower than its heads."""
    for heads_of in ({64: 4, 256: 16}, {64: 8, 256: 32}):
        files = []
        for width, heads in heads_of.items():
            contents = network(width, head_dim=16, attention=1 / 16)
            for layer in range(2):
                for name in ("q_proj", "k_proj", "v_proj"):
                    del contents[f"h.{layer}.attn.{name}.weight"]
                out = contents[f"h.{layer}.attn.o_proj.weight"]
                rows = 16 * (heads + 2 * kv_heads)
                contents[f"h.{layer}.attn.qkv.weight"] = {**out, "shape": [rows, width]}
                out.update(shape=[width, 16 * heads], std=(16 * heads) ** -0.5)
            files.append(contents)
        code, report = verified(tmp_path, *files)
        assert (code, report["lines"][0]["verdict"]) == (0, "right"), report["lines"][0]["findings"]
        assert report["lines"][0]["grows"].get("kv_heads") is None


def test_what_some_parameters_lack_is_in_the_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def without(column: str, value: float | None) -> list[Contents]:
        def change(name: str, entry: Contents) -> Contents | None:
            return {column: value} if "c_fc" in name else None

        return [changed(network(width), change) for width in (64, 256)]

    code, text = shown(capsys, tmp_path, *without("lr", None))
    assert code == 0
    assert text.startswith(
        "RIGHT: nothing is wrong in what the files say as width grows x4, held against mup; "
        "not judged, because the files lack it: lr of h.*.mlp.c_fc.weight."
    )
    _, text = shown(capsys, tmp_path, *without("std", None))
    assert "files lack it: std of h.*.mlp.c_fc.weight." in text
    _, text = shown(capsys, tmp_path, *without("lr", 0.0))
    assert "files lack it: lr above 0 of h.*.mlp.c_fc.weight." in text
    _, text = shown(capsys, tmp_path, network(64), network(256))
    assert "lack" not in text


def test_an_unknown_factor_of_branches_is_in_the_first_line_where_depth_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [network(64, layers, branch=None) for layers in (2, 8)]
    _, text = shown(capsys, tmp_path, *files)
    first_line = text.split(" Next: ")[0]
    assert first_line.endswith("not judged, because the files lack it: branch.")


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.0, -0.25])
def test_a_factor_on_branches_is_judged_alike_as_a_multiplier_of_their_last_matrices(
    exponent: float, tmp_path: Path
):
    files = [network(64, 2, branch=1.0), network(64, 8, branch=4.0**exponent)]
    code, as_branch = verified(tmp_path, *files)

    def moved(name: str, entry: Contents) -> Contents | None:
        del entry
        is_last = "o_proj" in name or "c_proj" in name
        return {"multiplier": 4.0**exponent} if is_last else None

    files[1] = changed(network(64, 8, branch=1.0), moved)
    moved_code, as_multiplier = verified(tmp_path, *files)
    assert moved_code == code
    if exponent in (-1.0, -0.5):
        del as_branch["notes"], as_multiplier["notes"]
        assert as_multiplier == as_branch


def test_what_is_wrong_under_sgd_is_not_explained_by_rules_of_adam(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [network(width, optimizer="sgd") for width in (64, 256)]
    code, text = shown(capsys, tmp_path, *files)
    assert code == 1
    assert (
        "ln_1.weight (block.norm_gain): the learning rate stays and should grow as width^1" in text
    )
    assert "is to stay" not in text


def test_a_std_that_falls_is_not_said_to_be_one_for_all_widths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # The std falls as width^-0.25, and is to fall as width^-0.5.
    def slower(name: str, entry: Contents) -> Contents | None:
        return {"std": entry["std"] * 2.0} if name.startswith("h.") and "ln" not in name else None

    _, text = shown(capsys, tmp_path, network(64), changed(network(1024), slower))
    assert "the initial size falls as width^-0.25" in text
    assert "One std for every width" not in text


@pytest.mark.parametrize(
    ("name", "optimizer"), [("fusedadam", "adamw"), ("adamw8bit", "adamw"), ("adam8bit", "adam")]
)
def test_classes_that_train_as_a_known_optimizer_are_known(
    name: str, optimizer: str, tmp_path: Path
):
    _, report = verified(tmp_path, *(network(width, optimizer=name) for width in (64, 256)))
    assert report["lines"][0]["optimizer"] == optimizer


def test_a_flag_says_which_optimizer_an_unknown_one_is_like(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [network(width, optimizer="nadam") for width in (64, 256)]
    code, text = shown(capsys, tmp_path, *files)
    assert code == 2
    assert "0.json: no optimizer is named 'nadam'; write --optimizer with the nearest of" in text
    assert shown(capsys, tmp_path, *files, flags=("--optimizer", "adam"))[0] == 0
