"""Tool calls and reasoning in the output of models: parsers, and the guides that guarantee calls.

    pieces      what an output consists of
    parser      the parser of an output
    detection   the formats of a model, from its chat template
    guides      constraints that guarantee calls
    tools       the functions that a request offers
    formats     one module for each format of tool calls

Parsers are incremental and linear in the text. Their pieces, adjacent ones of a kind joined, do not
depend on how the output was split.
"""

from inflight.door.gateway.parsers.detection import (
    Formats,
    detect,
    markers,
    opens_reasoning,
    reasoning_switches,
    unread_variables,
)
from inflight.door.gateway.parsers.formats.registry import FORMATS
from inflight.door.gateway.parsers.guides import Guide, guide_for
from inflight.door.gateway.parsers.parser import parser_for, plain
from inflight.door.gateway.parsers.pieces import (
    CallArguments,
    CallBegun,
    OutputParser,
    Piece,
    Reasoning,
    Text,
)
from inflight.door.gateway.parsers.tools import schemas_of

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegun",
    "Formats",
    "Guide",
    "OutputParser",
    "Piece",
    "Reasoning",
    "Text",
    "detect",
    "guide_for",
    "markers",
    "opens_reasoning",
    "parser_for",
    "plain",
    "reasoning_switches",
    "schemas_of",
    "unread_variables",
]
