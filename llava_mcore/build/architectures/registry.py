"""The classes that can be built, and the choice among them. The register (config/model_classes.py) names them."""

from __future__ import annotations

from llava_mcore.build.architectures.base import FolderClass
from llava_mcore.build.options import CONNECTORS, BuildOptions
from llava_mcore.config.model_classes import MODEL_CLASSES, instance
from llava_mcore.errors import ConfigError

_CLASSES: tuple[FolderClass, ...] = tuple(
    instance("llava_mcore.build.architectures", row.folder) for row in MODEL_CLASSES.values() if row.folder is not None
)


def folder_class(options: BuildOptions) -> FolderClass:
    """Return the class of the folder.

    Raises:
        ConfigError: an unknown connector or architecture, or a connector that does not fit the architecture.
    """
    if options.connector not in (None, *CONNECTORS):
        raise ConfigError(f"--connector {options.connector}: unknown; choose one of {', '.join(CONNECTORS)}")
    kinds = [kind for kind in _CLASSES if options.architecture in (None, kind.architecture)]
    if not kinds:
        known = ", ".join(kind.architecture for kind in _CLASSES)
        raise ConfigError(f"--architecture {options.architecture}: cannot be built; choose one of {known}")
    for kind in kinds:
        if options.connector in (None, kind.connector):
            return kind
    raise ConfigError(
        f"--architecture {options.architecture} has the connector {kinds[0].connector}; --connector "
        f"{options.connector} does not fit it: omit one of them"
    )
