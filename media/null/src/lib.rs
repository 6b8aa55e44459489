//! A device that stores nothing.
