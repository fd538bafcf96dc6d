"""The Dockerfile, whose steps run in an empty environment here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.test_install import wheel  # noqa: F401  # a fixture

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "packaging" / "Dockerfile").read_text()

pytestmark = pytest.mark.slow


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def test_its_python_and_its_extras_are_ours() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (image,) = instructions("FROM")
    version = image.removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    named = set(re.findall(r"EXTRA=(\w+)", DOCKERFILE))
    assert named == {"cuda", "tpu"} <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("extra", ["cuda", "tpu"])
def test_its_steps_install_a_command_that_trains(
    extra: str,
    wheel: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    # Both wheels of `make wheels` lie in the context.
    (tmp_path / "dist").mkdir()
    shutil.copy(wheel, tmp_path / "dist")
    (tmp_path / "dist" / "mupax_presets-0.1.0-py3-none-any.whl").touch()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (copied,) = instructions("COPY")
    source, target = copied.split()
    assert target == "/wheels/"
    for file in tmp_path.glob(source):
        shutil.copy(file, wheels)
    # The image's pip, with packages that are here in place of an index.
    pip = environment / "bin" / "pip"
    pip.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m pip --python {environment}/bin/python "$@"\n'
    )
    pip.chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "EXTRA": extra,
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    variables.pop("PYTHONPATH", None)
    for command in instructions("RUN"):
        command = command.replace("/wheels", str(wheels))
        subprocess.run(["sh", "-ec", command], check=True, cwd=tmp_path, env=variables)
    (packages,) = environment.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(borrowed)))

    (entry,) = instructions("ENTRYPOINT")
    words = [str(environment / "bin" / json.loads(entry)[0])]
    words += ["train", "lm-tiny", "--steps", "3", "--print-config"]
    result = subprocess.run(
        words, check=True, cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert json.loads(result.stdout)["steps"] == 3
