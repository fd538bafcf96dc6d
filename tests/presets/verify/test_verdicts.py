"""Exit code, first line, findings and consequences of `verify` agree for any dump."""

from __future__ import annotations

from random import Random

import pytest

from mupax import presets
from mupax.presets.rule import Decay
from mupax.presets.verify.reference import ORDER
from tests.presets.verify.dumps import (
    Contents,
    changed,
    decoder,
    dump,
    grown,
    network,
    networks,
    pair,
    shown,
    verified,
)  # fmt: skip

pytestmark = pytest.mark.core

TABLE = "wte.weight"


def without(files: list[Contents], *columns: str) -> list[Contents]:
    """Return dumps whose entries lack some columns."""
    return [
        {name: {k: v for k, v in entry.items() if k not in columns} for name, entry in file.items()}
        for file in files
    ]


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("attn.q_proj", "attn.k_proj"),
        ("attn_q", "attn_k"),  # of no known name
        ("attn.w1", "attn.w2"),  # taken for an MLP's
    ],
)
def test_attention_by_the_root_is_wrong_whatever_queries_are_called(query: str, key: str):
    assert shown(*networks(query=query, key=key)).text.startswith("RIGHT: ")
    root = [network(w, query=query, key=key, attention=(w / 4) ** -0.5) for w in (64, 256)]
    done = shown(*root)
    assert done.code == 1
    assert done.text.startswith("WRONG: 1 wrong")
    assert "attention logits: the forward multiplier falls as width^-0.5" in done.text


@pytest.mark.parametrize("lacking", [(), ("lr",)])
def test_attention_by_the_root_is_a_caution_under_any_preset_that_has_it(lacking: tuple[str, ...]):
    files = without(pair(presets.get("mup-half"), decoder(16), "head_dim"), *lacking)
    for flags in ("", "--preset mup-half"):
        done = shown(*files, flags=flags)
        assert done.code == 0
        assert done.text.startswith("RIGHT, with a caution: 0 wrong, 1 to know of")
        assert "caution attention logits" in done.text
        assert ("and those of the files do." in done.text) == (not lacking)
        assert ("the files do not say" in done.text) == bool(lacking)


def test_attention_at_a_fixed_head_is_of_no_concern():
    done = shown(*networks(head_dim=16, attention=0.25))
    assert done.code == 0
    assert "attention logits" not in done.text


def test_names_that_were_taken_for_hidden_matrices_are_listed():
    text = shown(*networks(query="attn_q", key="attn_k")).text
    assert (
        "note: taken for hidden matrices by their shapes, as their names say nothing: h.*.attn_q.weight, h.*.attn_k.weight"
        in text
    )
    assert "--role 'h.*.attn_q.weight=query'" in text
    assert "taken for" not in shown(*networks()).text


def test_attention_without_a_name_or_a_head_is_asked_for():
    names = {"query": "left", "key": "right"}
    files = [
        {n.replace("v_proj", "third").replace("o_proj", "fourth"): e for n, e in x.items()}
        for x in networks(**names)
    ]
    assert verified(*files).code == 0
    for contents in files:
        del contents["model"]["head_dim"]
    done = shown(*files)
    assert done.code == 2
    assert "write --head-dim 64" in done.message


@pytest.mark.parametrize(("layers", "noise"), [(1, 0.0), (3, 1e-7), (12, 0.0)])
def test_an_overwritten_scheduler_is_named_with_any_number_of_layers(layers: int, noise: float):
    random = Random(0)

    def one_rate(name: str, entry: Contents) -> Contents:
        return {"lr": 6e-4 * (1 + noise * random.random())}

    right = networks(layers=layers)
    words = "a scheduler that sets the rate of all groups to its own undoes those of the groups"
    assert words in shown(*(changed(file, one_rate) for file in right)).text
    assert "scheduler" not in shown(*right).text


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_readout_that_starts_too_small_is_one_caution(optimizer: str):
    files = pair(presets.get("mup"), decoder(16), optimizer=optimizer)
    files[1]["readout"]["std"] /= 4
    done = shown(*files)
    assert done.code == 0
    assert done.text.startswith("RIGHT, with a caution: 0 wrong, 1 to know of")
    assert "the logits start width^-1 smaller than they should" in done.text
    assert "training recovers" in done.text
    assert "explode" not in done.text
    files[1]["readout"]["lr"] /= 16 if optimizer == "sgd" else 4
    assert verified(*files).code == 1


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (TABLE, [256], "wte.weight has the shape [256, 64] in 0.json and [256] in 1.json, which is another number"),
        (TABLE, [256, 128], "wte.weight has the shape [256, 64] in 0.json and [256, 128] in 1.json, and no parameter"),
        (TABLE, [256, 64], "wte.weight has the shape [256, 64] in 0.json and [256, 64] in 1.json, and no parameter"),
        ("lm_head.weight", [256, 256, 1], "lm_head.weight has the shape [256, 64] in 0.json and [256, 256, 1]"),
        ("h.{}.attn.v_proj.weight", [128, 256], "h.*.attn.v_proj.weight has the shape [64, 64] in 0.json and [128"),
        ("h.{}.ln_1.weight", [64], "h.*.ln_1.weight has the shape [64] in 0.json and [64] in 1.json: it is 1 times"),
        ("h.{}.mlp.c_proj.weight", [256, 512], "h.*.mlp.c_fc.weight has the shape [256, 64] in 0.json and [1024, 256]"),
    ],
)  # fmt: skip
def test_shapes_that_are_of_no_one_model_are_refused(name: str, shape: list[int], words: str):
    small, large = networks()
    for layer in range(2):
        large[name.format(layer)]["shape"] = shape
    done = shown(small, large)
    assert done.code == 2
    assert words in done.message
    assert "write" in done.message


def test_a_vocabulary_that_was_padded_is_no_other_shape():
    small, large = networks()
    for name in (TABLE, "lm_head.weight"):
        large[name]["shape"] = [320, 256]
    assert verified(small, large).code == 0


@pytest.mark.parametrize("axis", ["heads", "head_dim"])
@pytest.mark.parametrize("lacking", [(), ("eps",), ("eps", "wd", "lr"), ("std",)])
def test_of_presets_that_fit_equally_well_mup_is_first(axis: str, lacking: tuple[str, ...]):
    files = without(pair(presets.get("mup"), decoder(16), axis), *lacking)
    assert verified(*files).line["reference"] == "mup"


def anything(random: Random) -> tuple[list[Contents], str]:
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
        factor = 4.0 ** random.choice([-1, -0.5, 0.5, 1])
        files[1]["model"][random.choice(["attention", "branch"])] *= factor
    if random.random() < 0.2:
        files = [changed(x, lambda n, e: {"std": 0.0} if n == "readout" else None) for x in files]
    return files, f"--preset {name}" if random.random() < 0.3 else ""


@pytest.mark.parametrize("seed", range(4))
def test_exit_code_verdict_and_consequences_agree_for_any_dump(seed: int):
    random = Random(seed)
    verdicts = set[str]()
    heads = {"wrong": "WRONG: ", "caution": "RIGHT, with a caution: ", "right": "RIGHT: "}
    for _ in range(8):
        files, flags = anything(random)
        done = shown(*files, flags=flags)
        assert done.code in (0, 1), done
        line = verified(*files, flags=flags).line
        verdict = line["verdict"]
        severities = {finding["severity"] for finding in line["findings"]}
        verdicts.add(verdict)
        assert (verdict == "wrong") == (done.code == 1) == ("fault" in severities), done
        assert (verdict == "right") == (not severities), done
        assert done.text.startswith(heads[verdict]), done
        if verdict != "wrong":
            assert "explode" not in done.text, done
            limits = {entry["verdict"] for entry in line["limits"].values()}
            assert not limits & {"explodes", "lazy"}, done
        if verdict == "right":
            assert not line["limits"], done
    assert len(verdicts) > 1  # the dumps are not all alike


@pytest.mark.parametrize(
    "name",
    [
        "wte", "embedding", "emb", "src_embedding", "bert.embeddings.token_type_embeddings",
        "value_embeds.0", "y_embedder.embedding_table",
    ],
)  # fmt: skip
def test_a_table_of_embeddings_is_no_readout_whatever_it_is_called(name: str):
    """Known names, and such as only say that they embed something."""
    table = f"{name}.weight"
    files = []
    for contents in networks():
        files.append({table if n == TABLE else n: entry for n, entry in contents.items()})
    judged = verified(*files)
    assert (judged.code, judged.line["verdict"], judged.report["guessed"]) == (0, "right", {})
    files[1][table]["lr"] /= 4
    judged = verified(*files)
    (finding,) = judged.findings
    assert (judged.code, finding["names"], finding["role"]) == (1, [table], "token_embedding")


def test_a_matrix_that_is_called_an_embedding_is_told_by_its_shapes():
    def extra(width: int) -> Contents:
        matrix = {"shape": [width, 12], "std": 0.3, "lr": 6e-4, "wd": 0.0, "eps": 1e-8}
        return {
            "embed.weight": matrix,
            "time_embed.2.weight": {**matrix, "shape": [width, width], "std": width**-0.5,
                                    "lr": 6e-4 * 64 / width, "eps": 1e-8 * 64 / width},
            "time_embed.2.bias": {"shape": [width], "lr": 6e-4},
        }  # fmt: skip

    judged = verified(*networks(extra))
    assert judged.code == 0
    assert judged.report["guessed"] == {
        "embed.weight": "patch_embedding", "time_embed.2.weight": "hidden"
    }  # fmt: skip


def test_a_linear_probe_is_a_readout_and_a_probe_of_a_pooling_head_is_a_vector():
    files = networks()
    for contents in files:
        width = contents[TABLE]["shape"][1]
        contents["probe.weight"] = {**contents["lm_head.weight"], "shape": [10, width]}
        contents["pool.probe"] = {**contents[TABLE], "shape": [1, width]}
    judged = verified(*files)
    assert (judged.code, judged.report["guessed"]) == (0, {"probe.weight": "readout"})
    files[1]["probe.weight"]["multiplier"] = 1.0
    assert verified(*files).code == 1  # the control: without the multiplier of a readout


def test_low_rank_adapters_are_not_judged():
    def adapters(width: int) -> Contents:
        entry = {"std": 0.02, "lr": 6e-4, "wd": 0.0, "eps": 1e-8}
        return {
            "h.0.attn.q_proj.lora_A.default.weight": {**entry, "shape": [8, width]},
            "h.0.attn.q_proj.lora_B.default.weight": {**entry, "shape": [width, 8]},
        }

    files = networks(adapters)
    judged = verified(*files)
    assert (judged.code, judged.line["verdict"], judged.report["guessed"]) == (0, "right", {})
    files[1]["h.0.attn.q_proj.weight"]["lr"] *= 4
    assert verified(*files).code == 1  # the control: the matrix that they adapt


def test_the_second_factor_of_a_table_is_no_table():
    """With the layout of PyTorch. Without one nothing shows which dimension it reads."""
    values = {"std": 0.5, "lr": 6e-4}

    def factors(name: str, width: int) -> Contents:
        shape = [width, 12] if name.endswith("weight") else [12, width]
        return {TABLE: {**values, "shape": [256, 12]}, name: {**values, "shape": shape}}

    name = "tok_embeddings_proj"
    done = shown(*networks(lambda width: factors(name, width), without=TABLE))
    assert done.code == 2
    assert f"nothing says what {name} is; write --role" in done.message
    files = networks(lambda width: factors(f"{name}.weight", width), without=TABLE)
    done = shown(*files)
    assert done.code == 2
    assert "wte.weight has the shape [256, 12]" in done.message
    assert "leave it out by --role 'wte.weight=none'" in done.message
    text = shown(*files, flags="--role 'wte.weight=none'").text
    assert "taken for patch_embedding by their shapes, as their names say nothing: tok_emb" in text


def test_a_norm_beside_the_matrix_that_embeds_patches_is_a_norm():
    """As in lucidrains' ViT, whose first module is a Sequential."""

    def patches(width: int) -> Contents:
        return {
            "to_patch_embedding.1.weight": {"shape": [48], "lr": 6e-4},
            "to_patch_embedding.2.weight": {"shape": [width, 48], "std": 0.14, "lr": 6e-4},
            "to_patch_embedding.3.weight": {"shape": [width], "lr": 6e-4},
        }

    judged = verified(*networks(patches, without=TABLE))
    assert judged.code == 0
    assert judged.report["guessed"] == {
        "to_patch_embedding.1.weight": "norm_gain",
        "to_patch_embedding.2.weight": "patch_embedding",
        "to_patch_embedding.3.weight": "norm_gain",
    }


def test_a_bias_of_a_hidden_matrix_in_a_block_is_judged_as_a_vector():
    """Such as those of torchvision's `mlp.0`, whose name says nothing."""
    files = []
    for width in (64, 256):
        contents = network(width)
        for layer in range(2):
            contents[f"h.{layer}.mlp.0.weight"] = contents.pop(f"h.{layer}.mlp.c_fc.weight")
            bias = {"shape": [4 * width], "lr": 6e-4, "eps": 1e-8 * 64 / width}
            contents[f"h.{layer}.mlp.0.bias"] = bias
        files.append(contents)
    assert verified(*files).code == 0
    for layer in range(2):
        files[1][f"h.{layer}.mlp.0.bias"]["lr"] /= 4
    judged = verified(*files)
    assert (judged.code, judged.faults) == (1, ["h.*.mlp.0.bias"])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_fused_matrix_shows_its_key_heads_beside_what_reads_the_heads(kv_heads: int):
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
        judged = verified(*files)
        assert (judged.code, judged.line["verdict"]) == (0, "right"), judged.findings
        assert judged.line["grows"].get("kv_heads") is None


def test_what_some_parameters_lack_is_in_the_first_line():
    def without_column(column: str, value: float | None) -> str:
        def change(name: str, entry: Contents) -> Contents | None:
            return {column: value} if "c_fc" in name else None

        done = shown(*(changed(file, change) for file in networks()))
        assert done.code == 0
        return done.text

    assert without_column("lr", None).startswith(
        "RIGHT: nothing is wrong in what the files say as width grows x4, held against mup; "
        "not judged, because the files lack it: lr of h.*.mlp.c_fc.weight."
    )
    assert "files lack it: std of h.*.mlp.c_fc.weight." in without_column("std", None)
    assert "files lack it: lr above 0 of h.*.mlp.c_fc.weight." in without_column("lr", 0.0)
    assert "lack" not in shown(*networks()).text


def test_an_unknown_factor_of_branches_is_in_the_first_line_where_depth_grows():
    text = shown(*(network(64, layers, branch=None) for layers in (2, 8))).text
    first_line = text.split(" Next: ")[0]
    assert first_line.endswith("not judged, because the files lack it: branch.")


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.0, -0.25])
def test_a_factor_on_branches_is_judged_alike_as_a_multiplier_of_their_last_matrices(
    exponent: float,
):
    def moved(name: str, entry: Contents) -> Contents | None:
        is_last = "o_proj" in name or "c_proj" in name
        return {"multiplier": 4.0**exponent} if is_last else None

    small = network(64, 2, branch=1.0)
    as_branch = verified(small, network(64, 8, branch=4.0**exponent))
    as_multiplier = verified(small, changed(network(64, 8, branch=1.0), moved))
    assert as_multiplier.code == as_branch.code
    if exponent in (-1.0, -0.5):
        del as_branch.report["notes"], as_multiplier.report["notes"]
        assert as_multiplier == as_branch


def heads_of_flax(width: int, name: str, heads: int) -> Contents:
    """Return `network` in JAX's layout, whose queries, keys and values have three dimensions."""
    contents = network(width, head_dim=width // heads, attention=heads / width)
    renamed: Contents = {}
    for path, entry in contents.items():
        if not path.endswith("weight"):
            renamed[path] = entry
            continue
        shape = entry["shape"][::-1] if "wte" not in path else entry["shape"]
        for letter in "qkv":
            if f"{letter}_proj" in path:
                shape = [width, heads, width // heads]
                path = path.replace(f"{letter}_proj", name.format(letter))
        renamed[path.replace("weight", "kernel")] = {**entry, "shape": shape}
    return renamed


@pytest.mark.parametrize("heads", [(4, 16), (4, 4)])
def test_a_matrix_with_heads_and_no_known_name_is_asked_for(heads: tuple[int, int]):
    """It was taken for a readout or for the matrix of patches, with a fan-in of width x heads."""

    def files(name: str) -> list[Contents]:
        return [heads_of_flax(64, name, heads[0]), heads_of_flax(256, name, heads[1])]

    assert verified(*files("{}_proj")).code == 0
    done = shown(*files("to{}"))
    assert done.code == 2
    assert (
        "nothing says what h.*.attn.toq.kernel, h.*.attn.tok.kernel, h.*.attn.tov" in done.message
    )
    roles = "--role '*.toq.kernel=query' --role '*.tok.kernel=key' --role '*.tov.kernel={}'"
    assert verified(*files("to{}"), flags=roles.format("value")).code == 0
    done = shown(*files("to{}"), flags=roles.format("hidden"))
    assert done.code == 2
    assert "write --role 'h.*.attn.tov.kernel=value' for [width, heads, head_dim]" in done.message


BRANCH_ENDS = ("block.attention.out", "block.mlp.down")


def in_matrices(
    contents: Contents, field: str, names: tuple[str, ...], columns: tuple[str, ...]
) -> Contents:
    """Return a dump whose factor `field` is 1, and is in values of matrices and their biases."""
    factor = contents["model"][field]
    times = 2 if contents["model"]["optimizer"] == "sgd" else 1
    powers = {"multiplier": 1, "std": 1, "lr": times, "eps": -1, "wd": -times}

    def moved(name: str, entry: Contents) -> Contents | None:
        if name.removesuffix("_bias") not in names:
            return None
        return {column: entry[column] * factor ** powers[column] for column in columns}

    return {**changed(contents, moved), "model": {**contents["model"], field: 1.0}}


@pytest.mark.parametrize("columns", [("multiplier",), ("std", "lr", "eps", "wd")])
@pytest.mark.parametrize(
    ("preset", "optimizer", "axis", "field", "names"),
    [
        ("completep", "adamw", "depth", "branch", BRANCH_ENDS),
        ("depth-mup", "adamw", "depth", "branch", BRANCH_ENDS),
        ("depth-mup", "sgd", "depth", "branch", BRANCH_ENDS),
        ("mup", "adamw", "head_dim", "attention", ("block.attention.query",)),
        ("mup", "sgd", "head_dim", "attention", ("block.attention.key",)),
    ],
)
def test_a_factor_that_is_in_values_of_matrices_is_judged_as_the_factor(
    preset: str, optimizer: str, axis: str, field: str, names: tuple[str, ...],
    columns: tuple[str, ...],
):  # fmt: skip
    files = pair(presets.get(preset), decoder(16), axis, optimizer)
    moved = [in_matrices(file, field, names, columns) for file in files]
    judged = verified(*moved)
    assert (judged.code, judged.findings) == (0, [])
    assert judged.line["reference"].startswith(preset)

    # The controls: nothing holds the factor, or a learning rate alone does not.
    without = [{**file, "model": {**file["model"], field: 1.0}} for file in files]
    assert verified(*without).code == 1
    rate = changed(moved[1], lambda n, e: {"lr": files[1][n]["lr"] * 4} if n in names else None)
    assert verified(moved[0], rate).code == 1


def test_what_is_wrong_under_sgd_is_not_explained_by_rules_of_adam():
    files = networks(optimizer="sgd")
    # Under SGD, Adam's rates are all off by one factor, which is another finding.
    files[1][TABLE] = {**files[1][TABLE], "lr": 4 * files[1][TABLE]["lr"]}
    done = shown(*files)
    assert done.code == 1
    words = "ln_1.weight (block.norm_gain): the learning rate stays and should grow as width^1"
    assert words in done.text
    assert "is to stay" not in done.text


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_a_rate_of_the_run_that_differs_between_sizes_is_one_fault_and_keeps_attention(
    factor: float, decay: Decay
):
    """At half the rate muP was held against mup-half, and its attention was to be changed."""
    small, large = pair(presets.get("mup"), decoder(16), "head_dim", decay=decay)
    files = [small, changed(large, lambda name, entry: {"lr": factor * entry["lr"]})]
    judged = verified(*files)
    assert (judged.code, judged.line["reference"]) == (1, "mup")
    assert judged.faults == ["every learning rate"]
    text = shown(*files).text
    assert f"every learning rate is {factor:g} times mup's at width 64" in text
    assert f"Divide every learning rate at width 64 by {factor:g}, to have the base's" in text
    # What the fault says to write is right.
    mended = changed(files[1], lambda name, entry: {"lr": entry["lr"] / factor})
    assert verified(small, mended).code == 0


def test_control_a_rate_that_only_one_kind_of_parameter_lacks_is_named():
    small, large = pair(presets.get("mup"), decoder(16), "head_dim")
    halved = changed(
        large, lambda name, entry: {"lr": entry["lr"] / 2} if name != "token" else None
    )
    judged = verified(small, halved)
    assert judged.code == 1
    assert "every learning rate" not in judged.faults
    assert "readout" in judged.faults


def test_a_table_whose_rate_falls_as_the_root_is_a_caution_and_no_published_mistake():
    """Both would be by the same paper, which has it so, and say that the rate is to stay."""
    small, large = pair(presets.get("mup"), decoder(16))

    def slower(factor: float) -> Contents:
        return changed(large, lambda n, e: {"lr": e["lr"] * factor} if n == "token" else None)

    done = shown(small, slower(1 / 2))
    assert done.code == 0
    assert done.text.startswith("RIGHT, with a caution: 0 wrong, 1 to know of")
    assert "2506.15025 and 2407.17465 have it so" in done.text
    assert "issue 48" not in done.text
    assert shown(small, slower(1 / 2), flags="--strict").code == 1
    # The control: as a hidden matrix.
    done = shown(small, slower(1 / 4))
    assert done.code == 1
    assert "issue 48" in done.text


@pytest.mark.parametrize(("projection", "code"), [("k_proj", 0), ("q_proj", 1)])
def test_the_bias_of_keys_moves_no_weight_of_attention_and_is_not_judged(
    projection: str, code: int
):
    """It shifts all logits of a query alike. The control is the bias of queries."""

    def bias(width: int) -> Contents:
        entry = {"shape": [width], "std": 0.0, "lr": 6e-4 * 64 / width, "wd": 0.0}
        return {f"h.{layer}.attn.{projection}.bias": entry for layer in range(2)}

    assert shown(*networks(bias)).code == code


def test_a_std_that_falls_is_not_said_to_be_one_for_all_widths():
    # The std falls as width^-0.25, and is to fall as width^-0.5.
    def slower(name: str, entry: Contents) -> Contents | None:
        return {"std": entry["std"] * 2.0} if name.startswith("h.") and "ln" not in name else None

    text = shown(network(64), changed(network(1024), slower)).text
    assert "the initial size falls as width^-0.25" in text
    assert "One std for every width" not in text


@pytest.mark.parametrize(
    ("name", "optimizer"), [("fusedadam", "adamw"), ("adamw8bit", "adamw"), ("adam8bit", "adam")]
)
def test_classes_that_train_as_a_known_optimizer_are_known(name: str, optimizer: str):
    assert verified(*networks(optimizer=name)).line["optimizer"] == optimizer


def test_a_flag_says_which_optimizer_an_unknown_one_is_like():
    files = networks(optimizer="nadam")
    done = shown(*files)
    assert done.code == 2
    assert (
        "0.json: no optimizer is named 'nadam'; write --optimizer with the nearest of"
        in done.message
    )
    assert shown(*files, flags="--optimizer adam").code == 0
