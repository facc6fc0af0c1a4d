"""Commands whose options are dataclasses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from inflight.cli import app
from inflight.cli.option_groups import expand_groups


@dataclass(frozen=True, kw_only=True)
class Place:
    """With a required option."""

    city: Annotated[str, typer.Option()]
    zip_: Annotated[list[str] | None, typer.Option("--zip")] = None


@dataclass(frozen=True, kw_only=True)
class PlaceInKyoto(Place):
    city: Annotated[str, typer.Option()] = "Kyoto"


@expand_groups
def visit(
    *,
    name: Annotated[str, typer.Argument()],
    place: Place,
    days: Annotated[int, typer.Option()] = 1,
) -> None:
    """Visit a place."""
    print(name, place, days)


def invoke(command: object, *arguments: str) -> tuple[int, str]:
    """Exit status and output."""
    one = typer.Typer()
    one.command()(command)
    done = CliRunner().invoke(one, arguments)
    return done.exit_code, done.output


def test_a_command_gets_the_dataclass_of_its_options() -> None:
    given = ("Ada", "--zip", "1", "--zip", "2", "--city", "Nara", "--days", "3")
    assert invoke(visit, *given) == (0, "Ada Place(city='Nara', zip_=['1', '2']) 3\n")
    assert invoke(visit, "Ada", "--city", "Uji") == (0, "Ada Place(city='Uji', zip_=None) 1\n")


def test_a_field_without_a_default_is_required() -> None:
    status, output = invoke(visit, "Ada")
    assert status == 2 and "--city" in output


def test_a_subclass_changes_a_default_and_keeps_the_order() -> None:
    @expand_groups
    def stay(place: PlaceInKyoto) -> None:
        print(place)

    stay_options = inspect.signature(stay).parameters
    assert list(stay_options) == ["city", "zip_"]
    assert invoke(stay) == (0, "PlaceInKyoto(city='Kyoto', zip_=None)\n")


def test_options_are_in_the_order_of_parameters_and_fields() -> None:
    assert list(inspect.signature(visit).parameters) == ["name", "city", "zip_", "days"]
    _, output = invoke(visit, "--help")
    assert "Visit a place." in output
    assert output.index("--city") < output.index("--zip") < output.index("--days")


def test_two_options_of_one_name_are_refused() -> None:
    def clash(place: Place, city: str) -> None: ...

    with pytest.raises(ValueError, match="city"):
        expand_groups(clash)


def test_generate_and_chat_share_their_options() -> None:
    shared = ["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"]
    shared += ["url", "model", "timeout", "api_key", "ca_file"]
    generate, chat = inspect.signature(app.generate), inspect.signature(app.chat)
    assert list(generate.parameters) == ["prompt", *shared, "stats", "json_"]
    assert list(chat.parameters) == ["system", *shared]
    ensembles = [one.parameters["model"].default for one in (generate, chat)]
    assert ensembles == ["generate", "chat"]
