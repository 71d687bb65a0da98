"""What users may ask for about members that should go, what they are told, and whom a node cuts off."""
