"""What the engines of a machine share about its GPUs."""
