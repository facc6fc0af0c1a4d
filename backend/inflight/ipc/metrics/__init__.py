"""What processes count, for the metrics of a server and the usage of its accounts."""
