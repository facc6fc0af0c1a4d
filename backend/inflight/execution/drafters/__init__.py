"""Drafting the next tokens of a sequence, which the model then verifies in one step.

A drafter may be as wrong as it likes: a draft counts only where the model itself chooses the same
token, with the random number that belongs to its position. So an output does not depend on whether,
how and by what anything was drafted; only its speed does. A drafter that chooses as the model does,
with the same number, is right more often.

A method of drafting is a module in `methods`, which no other file names; `registry` finds it.
"""
