"""Products with matrices, fused with the operations before and after them."""
