"""The recipes of images: the same content in both, and the tested versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "environments"
IN_BASE = {"torch", "torchvision", "numpy"}


def pins(name: str) -> dict[str, str]:
    lines = (ENVIRONMENTS / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_images_hold_the_tested_versions_of_all_that_the_base_lacks() -> None:
    image, tested = pins("image.lock.txt"), pins("cpu.lock.txt")
    assert {name: tested.get(name, version) for name, version in image.items()} == image
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in project["dependencies"]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert (name in image) != (name in IN_BASE), name
        assert name in IN_BASE or requirement.specifier.contains(image[name]), text
    assert not [name for name in image if re.match(r"torch$|nvidia-|cuda-|triton", name)]


def test_both_recipes_have_the_same_content() -> None:
    recipe = (ENVIRONMENTS / "recipe_latest.def").read_text(encoding="utf-8")
    docker = (ENVIRONMENTS / "Dockerfile").read_text(encoding="utf-8")
    base = re.findall(r"^From: (\S+)$", recipe, re.MULTILINE)
    assert base == re.findall(r"^FROM (\S+)$", docker, re.MULTILINE) and len(base) == 1
    post = recipe.split("%post\n")[1].split("\n%")[0]
    commands = [line.strip() for line in post.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert [line.removeprefix("RUN ") for line in docker.splitlines() if line.startswith("RUN ")] == commands
    assert "environments/image.lock.txt /opt/llava_mcore/image.lock.txt" in recipe
    assert "COPY environments/image.lock.txt /opt/llava_mcore/image.lock.txt" in docker
