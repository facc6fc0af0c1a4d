"""Models of Triton that take a text and return a text: tokenizer, engine's front and detokenizer in
one, in the dialects of several servers."""
