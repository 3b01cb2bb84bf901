"""Who owns which block of the KV cache. Bookkeeping only: no tensor is ever touched here."""
