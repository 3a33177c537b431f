"""Build a recipe from a file, `--set key=value` and the options of a verb."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from quantmla.config import KVScheme, Recipe, method_defaults
from quantmla.errors import SchemeError


def build_recipe(file: Path | None, settings: list[str], **options: Any) -> Recipe:
    """Take the recipe file, or the defaults at c4r4, then the options, then each setting in turn.

    Args:
        file: YAML recipe, or None.
        settings: `key=value`; a dot reaches into a part, as train.lr_angle=0.02.
        options: fields that replace those of the file; None leaves one as it is.
    Returns: Recipe.
    Raises: SchemeError for an unreadable file, an unknown key or a value that does not fit.
    Source: own.
    """
    recipe = Recipe.from_yaml(file) if file else Recipe(scheme=KVScheme.parse("c4r4"))
    fields = recipe.model_dump()
    changes = [(name, value) for name, value in options.items() if value is not None]
    for name, value in changes + [parse_setting(text) for text in settings]:
        _assign(fields, name, value)
    return Recipe.model_validate(fields)


def change_recipe(base: dict, file: Path | None, settings: list[str]) -> dict:
    """Apply what a recipe file says, then each setting, to the fields of a recipe.

    Args: base [fields of Recipe, not changed]; file; settings [as in build_recipe].
    Returns: changed copy; fields that neither names are as in base.
    Raises: SchemeError as build_recipe.
    Source: own.
    """
    fields = copy.deepcopy(base)
    if file:
        recipe = Recipe.from_yaml(file)
        fields |= recipe.model_dump(include=recipe.model_fields_set)
    for text in settings:
        _assign(fields, *parse_setting(text))
    return fields


def parse_setting(text: str) -> tuple[str, Any]:
    """Split `key=value` and read the value as YAML, numbers such as 3e-4 included.

    Args: text [as typed].
    Returns: (key, value).
    Raises: SchemeError if there is no `=` or the value is not YAML.
    Source: own.
    """
    name, equals, value = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError("no key or no =")
        parsed = yaml.safe_load(value)
    except (ValueError, yaml.YAMLError) as error:
        raise SchemeError(
            "a setting cannot be read",
            where=f"--set {text}",
            expected="key=value, as steps=100 or train.lr_angle=0.02",
            got=str(error).splitlines()[0],
        ) from error
    if isinstance(parsed, str):  # YAML 1.1 takes 3e-4 for a string
        with suppress(ValueError):
            parsed = float(parsed)
    return name.strip().replace("-", "_"), parsed


def _assign(fields: dict, name: str, value: Any) -> None:
    if name == "method":  # what was left at the defaults of the old method takes those of the new
        new = method_defaults(value)
        for key, default in method_defaults(fields.get("method", "quantmla")).items():
            if fields.get(key, default) == default:
                fields[key] = new[key]
    if name == "scheme":  # a name keeps the other settings of the scheme
        parsed = KVScheme.parse(value)
        name, value = (
            "scheme",
            {
                **fields.get("scheme", {}),
                "content_bits": parsed.content_bits,
                "rope_bits": parsed.rope_bits,
            },
        )
    *parents, last = name.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {}) if parent in Recipe.model_fields else None
        if not isinstance(fields, dict):
            raise SchemeError(
                "a setting reaches into a field that has no parts",
                where=f"--set {name}",
                expected=f"one of {', '.join(Recipe.model_fields)}; parts of scheme and train",
                got=parent,
            )
    fields[last] = value
