"""Structured output: constrains an output's text, by masks of the tokens allowed next.

    guide       the client's constraint, validated as far as possible without a compiler
    schema      the checks of a JSON schema
    vocabulary  a model's tokens as the bytes that they add to a text
    grammar     a guide compiled by llguidance: each sequence starts with a copy of it
    sandbox     a child process that test-compiles a guide under limits
    compiler    guides in, grammars out, without blocking the engine's thread
    cache       recently compiled grammars
    matcher     the grammar state of one sequence
    masks       the tokens allowed next, for a whole batch

Independent of scheduler and runner. llguidance (https://github.com/guidance-ai/llguidance) does
the matching: an Earley parser over a lexer of regular-expression derivatives, walked along a trie
of the vocabulary, so nothing is precomputed per grammar and a mask costs microseconds.
"""
