"""What is sent: arrival times, lengths and prompts."""
