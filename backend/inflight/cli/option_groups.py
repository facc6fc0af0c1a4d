"""Groups of options: a command takes a dataclass, and typer sees its fields as options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each parameter that is a dataclass into one option per field, and build the dataclass
    when the command is called.

    A field has the type `Annotated[T, typer.Option(...)]`; one without a default is required. The
    options are in the order of the parameters and fields. A subclass may change a field's default.

    Raises:
        ValueError: two options have the same name.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, type[Any]] = {
        one.name: one.annotation
        for one in parameters
        if isinstance(one.annotation, type) and dataclasses.is_dataclass(one.annotation)
    }

    @functools.wraps(command)
    def run(**values: Any) -> None:
        built = {
            name: group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
            for name, group in groups.items()
        }
        command(**values, **built)

    expanded: list[inspect.Parameter] = []
    for one in parameters:
        if one.name in groups:
            expanded += _options(groups[one.name])
        else:
            expanded.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    # inspect.signature prefers it to the parameters; function types do not declare it.
    vars(run)["__signature__"] = inspect.Signature(expanded)
    return run


def _options(group: type[Any]) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        is_required = field.default is dataclasses.MISSING
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_required else field.default,
            annotation=types[field.name],
        )
