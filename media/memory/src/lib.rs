//! A device in RAM.
