"""Selects the trained parameters: whole parts, then patterns over names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.nn import Parameter
from transformers import PretrainedConfig

from llava_mcore.compat.megatron.frozen_linears import train_biases
from llava_mcore.config.sections.model import ModelConfig
from llava_mcore.errors import ConfigError, problems
from llava_mcore.models.architectures.expanded import prefixes_of_expanded
from llava_mcore.models.architectures.registry import architecture_of, tower_config
from llava_mcore.models.language.families.registry import embedding_rows
from llava_mcore.models.model_table import mapping_table, usual_names
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.weights.names import FUSED_DELTA_NORM, FUSED_NORMS

PARTS = ("vision_model", "vision_projection", "language_model")
_LISTED = 4  # names of one parameter in a message
_LAYERS = "language_model.decoder.layers."


@dataclass(frozen=True)
class _HfTensor:
    """A Hugging Face tensor of a Megatron parameter, with all its names."""

    parameter: str
    names: tuple[str, ...]


def trained_parameters(hf: PretrainedConfig, model: ModelConfig) -> dict[str, bool]:
    """Return for every parameter of the whole model, by its Megatron name, whether it is trained.

    Parts are frozen by `model.freeze_*`, then matches of `model.freeze`; matches of `model.unfreeze` are trained. A
    tower's constants, such as sinusoids, are frozen too unless they match. With `model.train_expanded` everything but
    the inserted layers is frozen before the patterns.

    Raises:
        ConfigError: patterns match nothing, or only a part of a parameter; or nothing is trained.
    """
    frozen = dict(
        zip(
            PARTS,
            (model.freeze_vision_model, model.freeze_vision_projection, model.freeze_language_model),
            strict=True,
        )
    )
    # A parameter may hold several of Hugging Face's: patterns are matched for each of these pieces.
    pieces = _pieces(hf)
    constants = {f"vision_model.{name}" for name in vision_family(tower_config(hf)).constants}
    state = {
        piece: not frozen[piece.parameter.partition(".")[0]] and piece.parameter not in constants for piece in pieces
    }
    if model.train_expanded:
        prefixes = prefixes_of_expanded(hf)
        state = {piece: piece.parameter.startswith(prefixes) for piece in pieces}
    errors = []
    for key, patterns, value in (("freeze", model.freeze, False), ("unfreeze", model.unfreeze, True)):
        for pattern in patterns:
            matching = [piece for piece in pieces if any(fnmatchcase(name, pattern) for name in piece.names)]
            state |= dict.fromkeys(matching, value)
            if not matching:
                example = ", ".join(pieces[-1].names[:2])
                errors.append(f"model.{key}: {pattern!r} matches no parameter; names look like {example}")
    # Pieces of one parameter must agree.
    trained = {piece.parameter: value for piece, value in state.items()}
    divided = dict.fromkeys(piece.parameter for piece, value in state.items() if trained[piece.parameter] != value)
    for parameter in list(divided)[:1]:
        names = [piece.names[1] for piece in pieces if piece.parameter == parameter]
        parts = ", ".join(names[:_LISTED]) + (" and the like" if len(names) > _LISTED else "")
        more = f" (and {len(divided) - 1} parameters like it)" if len(divided) > 1 else ""
        errors.append(f"{parameter}{more} is one parameter, so choose all of {parts}, or none")
    # One message with everything that is wrong.
    if not errors and not any(trained.values()):
        errors.append("nothing would be trained: unfreeze something")
    if errors:
        raise ConfigError(problems("the trained parameters cannot be selected like this", errors))
    return trained


def _pieces(hf: PretrainedConfig) -> list[_HfTensor]:
    rows = embedding_rows(hf)  # only names are needed
    styles = (usual_names(hf), *architecture_of(hf).names.styles)  # a pattern may refer to any of them
    tables = [mapping_table(hf, names, hf_tensors={}, padded_vocab_size=rows).entries for names in styles]
    return [
        _HfTensor(name, (name, *(table[name].hf_names[i] for table in tables)))
        for name, entry in tables[0].items()
        for i in range(len(entry.hf_names))
    ]


def whole_names(model: VisionLanguageModel) -> dict[str, Parameter]:
    """Return this stage's parameters under their names in the whole model."""
    return {whole_name(model, name): parameter for name, parameter in model.named_parameters()}


def whole_name(model: VisionLanguageModel, name: str) -> str:
    """Number layers from the first stage, and undo Transformer Engine's fused norms and the copy of a tied
    embedding."""
    for megatron_name, fused in (*FUSED_NORMS.items(), FUSED_DELTA_NORM):
        name = name.replace(fused, megatron_name)
    if name.startswith(_LAYERS):
        local, _, rest = name.removeprefix(_LAYERS).partition(".")
        return f"{_LAYERS}{model.language_model.decoder.layers[int(local)].layer_number - 1}.{rest}"
    if model.share_embeddings_and_output_weights and name == "language_model.output_layer.weight":
        return "language_model.embedding.word_embeddings.weight"
    return name


def alike(model: VisionLanguageModel) -> dict[str, Parameter]:
    """Return the trained parameters that every tensor-parallel rank has whole, by their names in the whole model."""
    return {
        name: parameter
        for name, parameter in whole_names(model).items()
        if parameter.requires_grad and not vars(parameter).get("tensor_model_parallel", False)
    }


def set_trained(model: VisionLanguageModel, trained: Mapping[str, bool]) -> None:
    """Freeze or unfreeze the parameters of a stage. Call before the model is wrapped for data parallelism."""
    for name, parameter in whole_names(model).items():
        parameter.requires_grad_(trained[name])
    train_biases(model)


def count_parameters(models: Sequence[VisionLanguageModel], *, first_tp_rank: bool) -> list[int]:
    """Return this rank's share of (all, trained) parameters of each of PARTS: added over the ranks of a replica, the
    whole model's.

    Args:
        first_tp_rank: whether to count parameters that all tensor-parallel ranks share.
    """
    counts = dict.fromkeys(((part, trained) for part in PARTS for trained in (False, True)), 0)
    for model in models:
        is_copy = model.share_embeddings_and_output_weights and not model.pre_process
        ep, etp = model.config.expert_model_parallel_size, model.config.expert_tensor_parallel_size
        for name, parameter in model.named_parameters():
            # Experts are divided over other ranks than those of a replica: one of these counts all of them.
            of_experts = vars(parameter).get("of_experts", False)
            is_divided = vars(parameter).get("tensor_model_parallel", False)
            if not (first_tp_rank or (is_divided and not of_experts)):
                continue
            if is_copy and name == "language_model.output_layer.weight":
                continue
            num_parts = ep * (etp if is_divided else 1) if of_experts else 1
            counts[name.partition(".")[0], parameter.requires_grad] += parameter.numel() * num_parts
    return [n for part in PARTS for n in (counts[part, False] + counts[part, True], counts[part, True])]
