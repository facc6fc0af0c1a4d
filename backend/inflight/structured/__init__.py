"""Structured output: what a text must match, and which tokens may come next for it to do so.

    guide       what a client asks for, checked as far as that needs no compiler
    schema      the checks of a JSON schema
    vocabulary  a model's tokens as the bytes that they add to a text
    grammar     what llguidance makes of a guide: the state of one sequence begins as a copy of it
    sandbox     a child process in which a guide is tried before anything else sees it
    compiler    guides in, grammars out, never in the way of the engine's thread
    cache       what was compiled lately
    matcher     where one sequence stands in its grammar
    masks       the tokens that a whole batch may take next

It knows neither scheduler nor runner. llguidance (https://github.com/guidance-ai/llguidance) does
the matching: an Earley parser over a lexer of regular-expression derivatives, walked along a trie
of the vocabulary, so nothing is precomputed per grammar and a mask costs microseconds.
"""
