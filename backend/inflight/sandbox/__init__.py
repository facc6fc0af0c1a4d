"""Child processes that run untrusted work under limits: grammars, chat templates, tokenizers.

process     the owner's side: starts a sandbox, gives it jobs, kills and replaces it
pool        several sandboxes for several threads
server      the sandbox's side: forks workers and relays jobs to them
worker      one fork: does jobs under limits, and may die of any of them
messages    what the two sides say to each other
frames      how they say it
"""
