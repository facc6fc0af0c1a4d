"""Drafting the next tokens of a sequence, which the model then verifies in one step.

A draft is accepted only if the model itself samples the same token, with the random number of its
position. So the output does not depend on the drafts, only its speed does. A drafter that samples
like the model, with the same random number, is accepted more often.

A drafting method is a module in `methods`, found by `registry`; no other file refers to it.
"""
