"""What users may ask for about members that should go, and what they are told."""
