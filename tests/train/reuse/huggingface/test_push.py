"""`push` against a server that answers as the hub does: what is sent, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.reuse.commands import call, refuse, succeed
from tests.train.reuse.huggingface.push_hub import PushHub, push_hub
from tests.train.reuse.random_weights import published


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PushHub]:
    """A hub without models. The current folder has `weights`, and `secret` outside of it."""
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "weights")
    Path("secret").write_text("of the user's")
    with push_hub(tmp_path / "home") as server:
        yield server


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_folder_of_weights_is_sent_as_it_is_and_private(hub: PushHub) -> None:
    out = succeed("push weights --to me/model").out
    assert f"2 files are at {hub.address}/me/model" in out
    assert hub.private == {"me/model": True}
    assert hub.files == files_of("weights")
    assert not succeed("push weights --to me/model").err  # again, to the same model
    err = succeed("push weights --to me/model --public").err
    assert "me/model was there and private, and stays so" in err


def test_half_of_a_folder_is_not_sent(hub: PushHub) -> None:
    file = Path("weights/model.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert "model.safetensors" in refuse("push weights --to me/model")
    file.unlink()
    first, second = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    Path("weights", first).write_bytes(content)
    index = {"weight_map": {"a": first, "b": second}}
    Path("weights/model.safetensors.index.json").write_text(json.dumps(index))
    assert second in refuse("push weights --to me/model")
    assert hub.calls == []


def test_an_upload_that_was_cut_off_is_written_again(hub: PushHub) -> None:
    hub.cuts_off = True
    code, _, err = call("push weights --to me/model")
    assert code == 1
    assert "does not answer" in err
    assert not hub.files
    hub.cuts_off = False
    succeed("push weights --to me/model")
    assert hub.files == files_of("weights")


@pytest.mark.parametrize("name", ["README.md", "vocab.txt", "model.safetensors.json"])
def test_a_link_out_of_the_folder_is_not_sent(hub: PushHub, name: str) -> None:
    link = Path("weights", name)
    link.symlink_to("../secret")
    assert name in refuse("push weights --to me/model --dry-run")
    link.unlink()
    Path("weights", "card").write_text("# A model\n")
    Path("weights", "README.md").symlink_to("card")  # the control stays inside
    assert "README.md" in succeed("push weights --to me/model --dry-run").out


def test_a_link_out_of_the_folder_is_not_imported(hub: PushHub) -> None:
    Path("weights", "vocab.txt").symlink_to("../secret")
    code, _, err = call("import weights --out in")
    assert code == 2
    assert "vocab.txt" in err


def test_weights_with_multipliers_are_exported_first_with_their_card(hub: PushHub) -> None:
    succeed("import weights --out mup --preset mup --base lm-proxy")
    assert "leave --no-ema out" in call("push mup --to me/model --public --no-ema").err
    assert not hub.files
    out, err = succeed("push mup --to me/model --public")[1:]
    assert not err
    assert hub.private == {"me/model": False}
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert json.loads(hub.files["config.json"])["model_type"] == "llama"
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers")
    assert "# `model`" in card
    assert "None is stated" in card
    assert "README.md" in out
    assert "the model card states no licence; --licence ID" in out
    out = succeed("push mup --to me/model --public --license MIT").out
    assert "states no licence" not in out
    header = "---\nlibrary_name: transformers\nlicense: mit\npipeline_tag: text-generation\n"
    assert hub.files["README.md"].decode().startswith(f"{header}tags:\n- mupax\n---\n")
    hub.calls.clear()
    code, _, err = call("push mup --to me/model --public --licence apache2")
    assert code == 2
    message = "no licence has this identifier at Hugging Face; did you mean apache-2.0"
    assert f"--licence apache2: {message}" in err
    assert not any("commit" in name for name in hub.calls)


def test_a_dry_run_lists_files_without_a_token_or_a_call(
    hub: PushHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    Path("weights/.secret.json").write_text("{}")
    out = succeed("push weights --to me/model --dry-run").out
    assert out.endswith("2 files for me/model, private; nothing was sent\n")
    assert "config.json" in out
    assert ".secret" not in out
    assert not hub.calls


OF_EXPORTS = "leave --step, --no-ema, --dtype, --tokenizer, --separator and --licence out"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "weights --to model",
            "--to model is no USER/NAME; write your name at Hugging Face before it, as in "
            "--to you/model",
        ),
        ("weights --to me/a--b", "--to me/a--b: "),
        ("weights --to me/seen", "me/seen is there and public; add --public"),
        ("weights --to other/model", "Hugging Face refused it (403: "),
        ("weights --to me/model --step 3", OF_EXPORTS),
        ("weights --to me/model --licence mit", OF_EXPORTS),
        ("nothing --to me/model", "no run and no weights there"),
    ],
)
def test_what_cannot_be_sent_is_refused(hub: PushHub, words: str, message: str) -> None:
    hub.private["me/seen"] = False
    code, _, err = call("push", words)
    assert code == 2
    assert message in err
    assert not hub.files
    assert set(hub.private) == {"me/seen"}  # none was made


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("hf_wrong", "Hugging Face refused it (401: "),
        ("", "no token of Hugging Face is here; write one that may write into HF_TOKEN"),
    ],
)
def test_a_token_that_may_not_write_is_refused(
    hub: PushHub, token: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
    code, _, err = call("push weights --to me/model")
    assert code == 2
    assert message in err
    assert not hub.files
    assert not hub.private


def test_a_hub_that_does_not_answer_is_said(hub: PushHub) -> None:
    hub.stop()
    code, _, err = call("push weights --to me/model")
    assert code == 1
    assert "does not answer" in err
