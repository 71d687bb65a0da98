"""What members write down and sign: ledger records, registers, reductions, and the rules over them."""
