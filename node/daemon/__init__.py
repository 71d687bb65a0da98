"""Process 1: asyncio and the network, without torch. It coordinates rounds and answers the user."""
