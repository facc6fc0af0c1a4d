"""What a load is sent to: a server and its protocol."""
