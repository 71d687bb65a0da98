"""Finding peers: seeds, DNS, peer exchange, the DHT; connections are kept to enough of them."""
