//! Guards and protection information: seal, verify, rebase, combine.
