"""The ops of a transformer, one module per family; `reference` defines what is right."""
