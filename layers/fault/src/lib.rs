//! Errors, delays, bit flips, torn, lost and misdirected writes, by rule and by seed.
