"""The recipes of images: the same content in both, and the tested versions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llava_mcore.cli.demo import PAGE
from llava_mcore.cli.serve import DEFAULT_PORT, parser

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / "environments"
IN_BASE = {"torch", "torchvision", "numpy"}


def pins(name: str) -> dict[str, str]:
    lines = (ENVIRONMENTS / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_images_hold_the_tested_versions_of_all_that_the_base_lacks() -> None:
    image, tested = pins("image.lock.txt"), pins("cpu.lock.txt")
    assert {name: tested.get(name, version) for name, version in image.items()} == image
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["serve"]]:
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


def test_compose_starts_our_commands() -> None:
    """The file is valid YAML, its commands parse, and what it names exists; there is no docker to run it."""
    text = (ENVIRONMENTS / "compose.yaml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    assert services.keys() == {"server", "page"}
    server, page = services["server"], services["page"]
    assert server["command"][:4] == ["python3", "-m", "llava_mcore", "serve"]
    flags = parser().parse_args(server["command"][4:])
    assert (flags.host, flags.port) == ("0.0.0.0", DEFAULT_PORT)
    assert f"{flags.hf_dir}:ro" == server["volumes"][0].rsplit("}:")[1]
    how, *check = server["healthcheck"]["test"]
    assert (how, check[0]) == ("CMD", server["command"][0])
    assert f"http://localhost:{DEFAULT_PORT}/health" in check[-1]
    # Nothing listens at port 9, so the check has to fail; test_serve.py tests that a server passes.
    assert subprocess.run([sys.executable, *check[1:-1], check[-1].replace(str(DEFAULT_PORT), "9")]).returncode == 1
    assert page["command"][:2] == ["--server", f"http://server:{DEFAULT_PORT}/v1"]
    assert page["ports"] == [f"127.0.0.1:7860:{page['command'][-1]}"]
    assert page["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert f"docker build --tag {server['image']} --file environments/Dockerfile" in text
    recipe = (ENVIRONMENTS.parent / page["build"]["dockerfile"]).read_text(encoding="utf-8")
    for source in re.findall(r"^COPY (\S+) ", recipe, re.MULTILINE):
        assert (ROOT / source).is_file()


def test_no_environment_and_no_output_is_copied_into_an_image() -> None:
    """What git ignores is left out too. Docker reads a name at the top level only, unless it begins with **/."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    in_docker_s_words = {x.strip("/") if x.startswith("/") else f"**/{x.strip('/')}" for x in ignored}
    assert {line for line in lines if not line.startswith("#")} == {".git", *in_docker_s_words}


def test_the_documentation_s_environment_is_locked_without_torch() -> None:
    """mkdocstrings reads sources, so the project and what it needs are not there."""
    lock = pins("docs.lock.txt")
    assert {"zensical", "mkdocstrings-python"} <= lock.keys()
    assert not {"torch", "transformers", "llava-mcore"} & lock.keys()


def test_the_page_s_environment_is_locked_without_torch() -> None:
    lock = pins("page.lock.txt")
    assert {"gradio", "httpx"} <= lock.keys()
    assert not {"torch", "transformers", "llava-mcore"} & lock.keys()
    page = PAGE.read_text(encoding="utf-8")
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", page, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"gradio", "httpx"}
